"""The loop with and without alignment on one GPU: mismatch, time, and where the first difference is.

    python benchmarks/gpu/align.py [--seconds 720] [--steps 15] [--folder runs/align] [--json FILE] [--dry-run]

Each flow (fp8_e2e, bf16, fp8_e2e with an FP8 KV cache) trains the tiny warm model, with nemo_fp8rl.align=vllm and then
none. An aligned flow that is not equal to the bit is followed by the first layer and operation in which trainer and
engine differ on one prompt. Then come step, log-prob pass and rollouts of a random Qwen3 of 2 layers and hidden 4096,
aligned and not. What no time is left for is left out, and said. --dry-run has the smallest sizes, on a CPU with
Triton's interpreter; there the first difference is looked for in any case.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.aligned_speed import ANSWER, rollout_speed, train_speed, write_models
from benchmarks.gpu.first_difference import find
from benchmarks.gpu.interpreted import ROOT, prepare
from benchmarks.gpu.report import ON_GPU, Report, percent, start

FLOWS = (("fp8_e2e", False), ("bf16", False), ("fp8_e2e", True))
"""(flow, with an FP8 KV cache), the most important first."""
STEP_LIMIT, ROLLOUT_LIMIT, EQUAL_LIMIT, ERROR_LIMIT = 1.05, 0.95, 0.999, 1.000_001
"""What is accepted: time of an aligned step, and tokens/s, over the unaligned; tokens that are equal to the bit."""
WARM_UP_STEPS = 130
SMALLEST = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.max_val_samples=2",  # at the end
    "policy.generation.max_new_tokens=3",
    "policy.train_global_batch_size=4",
    "policy.train_micro_batch_size=4",
)


class Measurement:
    """The parts of the run.

    folder:  models, data and runs
    steps:   of each loop
    """

    def __init__(self, report: Report, folder: Path, steps: int, dry_run: bool, backend: str | None = None) -> None:
        self.report, self.folder, self.steps, self.dry_run = report, folder, steps, dry_run
        self.attention = [f"policy.generation.vllm_cfg.attention_backend={backend}"] if backend else []

    def command(self, verb: str, recipe: str, *overrides: str) -> str:
        """Run `nemo-fp8rl VERB` in a process of its own; return "", or the end of what it wrote if it failed."""
        program = [str(ROOT / "benchmarks/gpu/interpreted.py")] if self.dry_run else ["-m", "nemo_fp8rl.cli"]
        done = subprocess.run(
            [sys.executable, *program, verb, "--config", str(ROOT / "conf" / recipe), *overrides],
            capture_output=True,
            text=True,
            check=False,
            timeout=max(60.0, self.report.seconds_left()),
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return "" if not done.returncode else " ".join(lines[-2:])[-400:] or f"exit status {done.returncode}"

    def in_process(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns in a process of its own, whose memory is free afterwards."""
        with ProcessPoolExecutor(1, get_context("spawn"), prepare if self.dry_run else None) as process:
            return process.submit(function, *arguments).result()

    def make_model(self) -> None:
        """Write the tiny model and its data, and warm it up; a dry run leaves it random."""
        from nemo_fp8rl.commands.tiny_model import make_tiny

        make_tiny(self.folder / "tiny", "add")
        if self.dry_run:
            shutil.copytree(self.folder / "tiny/model", self.folder / "tiny/warm")
            return
        warm = (f"logger.log_dir={self.folder}/tiny/sft", "--output", f"{self.folder}/tiny/warm")
        if error := self.command(
            "sft", "tiny_sft.yaml", *self.paths("model"), f"sft.max_num_steps={WARM_UP_STEPS}", *warm
        ):
            raise RuntimeError(error)

    def paths(self, model: str) -> tuple[str, ...]:
        return f"policy.model_name={self.folder}/tiny/{model}", f"data.train.data_path={self.folder}/tiny/data.jsonl"

    def overrides(self, flow: str, kv: bool, align: str) -> list[str]:
        return [
            *self.paths("warm"),
            f"nemo_fp8rl.flow={flow}",
            f"nemo_fp8rl.align={align}",
            "policy.generation.vllm_cfg.gpu_memory_utilization=0.1",
            *(["policy.generation.vllm_cfg.kv_cache_dtype=fp8"] if kv else self.attention),
            *(SMALLEST if self.dry_run else ()),
        ]

    def loop(self, flow: str, kv: bool, align: str, *further: str) -> dict[str, float] | str:
        """Return the means of a run's metrics, or why there are none.

        further:  overrides of this run
        """
        run = self.folder / "_".join([f"{flow}{'_kv' if kv else ''}_{align}", *(key.split(".")[-1] for key in further)])
        places = f"logger.log_dir={run}", f"grpo.max_num_steps={self.steps}", "checkpointing.enabled=false"
        if error := self.command("train", "tiny_cpu.yaml", *self.overrides(flow, kv, align), *further, *places):
            return error
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        trained = [row for row in rows if "train/token_mult_prob_error" in row]
        steady = trained[len(trained) // 3 :]  # the first steps compile
        return {
            "token_mult_prob_error": fmean(row["train/token_mult_prob_error"] for row in trained),
            "worst_step": max(row["train/token_mult_prob_error"] for row in trained),
            "gen_kl_error": fmean(row["train/gen_kl_error"] for row in trained),
            "exact_logprob_fraction": fmean(row["train/exact_logprob_fraction"] for row in trained),
            "overflow_ratio": fmean(row.get("train/overflow_ratio", 0.0) for row in trained),
            "step_seconds": median(row["timing/total_step_time"] for row in steady),
            "train_seconds": median(row["timing/train"] for row in steady),
            "logprob_seconds": median(row["timing/logprob"] for row in steady),
            "rollout_tokens_per_second": median(row["performance/generation_tokens_per_sec"] for row in steady),
        }

    def flow(self, flow: str, kv: bool) -> None:
        """Add the lines of a flow: aligned, not aligned, their ratios, and the first difference."""
        case, results = f"{flow}{', FP8 KV cache' if kv else ''}", {}
        for align in ("vllm", "none"):
            if not self.report.has_time():
                return
            result = self.loop(flow, kv, align)
            if isinstance(result, str):
                is_refused = align == "vllm" and "is not aligned" in result
                if is_refused:
                    self.report.add(f"{case}, align={align}", f"not aligned yet: {result}", refused=True)
                else:
                    self.report.fail(f"{case}, align={align}", RuntimeError(result))
                continue
            results[align] = result
            self.report.add(
                f"{case}, align={align}",
                f"token_mult_prob_error {result['token_mult_prob_error']:.6f} (worst {result['worst_step']:.6f}), "
                f"bit-equal {percent(result['exact_logprob_fraction'])}, step {result['step_seconds']:.3f} s, "
                f"train {result['train_seconds']:.3f} s, log-probs {result['logprob_seconds']:.3f} s, "
                f"rollout {result['rollout_tokens_per_second']:.0f} tokens/s",
                **result,
            )
        if len(results) == 2:
            self.ratios(case, *(results[align] for align in ("vllm", "none")))
        if aligned := results.get("vllm"):
            is_equal = aligned["exact_logprob_fraction"] == 1
            if aligned["exact_logprob_fraction"] < EQUAL_LIMIT or aligned["token_mult_prob_error"] > ERROR_LIMIT:
                self.report.failures.append(f"{case} is not equal to the bit")
            if not is_equal or self.dry_run:
                self.first_difference(case, flow, kv, "vllm")

    def first_difference(self, case: str, flow: str, kv: bool, align: str) -> None:
        name = f"{case}, align={align}, first difference"
        if self.report.has_time():
            with self.report.guard(name):
                found = self.in_process(find, self.overrides(flow, kv, align))
                self.report.add(name, found["first"], **found)

    def ratios(self, case: str, aligned: dict[str, float], unaligned: dict[str, float]) -> None:
        """Add a line of aligned over unaligned, for every figure that both have."""
        found = {
            name: aligned[name] / unaligned[name]
            for name in aligned
            if name.endswith(("seconds", "per_second")) and unaligned.get(name)
        }
        text = ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
        self.report.add(f"{case}, aligned / not", text, ratios=found)

    def speed(self, flow: str, sizes: dict[str, Any]) -> None:
        """Add the lines of the random model: step and log-prob pass, then rollouts."""
        sequences, length, rounds, counts, answer = (
            (2, 12, 1, [2], 2) if self.dry_run else (8, 2048, 5, [16, 64, 256], ANSWER)
        )
        case, folder = (
            f"{flow}, hidden {sizes['hidden_size']}, {sizes['num_hidden_layers']} layers",
            self.folder / "big",
        )
        if self.report.has_time():
            with self.report.guard(f"{case}, training"):
                found = {
                    align: self.in_process(train_speed, folder, flow, align, sequences, length, rounds)
                    for align in ("vllm", "none")
                }
                for align, row in found.items():
                    text = f"step {row['step_seconds']:.4f} s, log-probs {row['logprobs_seconds']:.4f} s, "
                    self.report.add(f"{case}, align={align}", text + f"peak {row['peak_bytes'] / 1e9:.1f} GB", **row)
                keys = "step_seconds", "logprobs_seconds"
                self.ratios(case, *({key: found[align][key] for key in keys} for align in found))
                if ON_GPU and found["vllm"]["step_seconds"] > STEP_LIMIT * found["none"]["step_seconds"]:
                    self.report.failures.append(f"{case}: an aligned step is more than {STEP_LIMIT} times as long")
        if self.report.has_time():
            with self.report.guard(f"{case}, rollouts"):
                speeds = self.in_process(rollout_speed, folder, flow, counts, answer, 1 if self.dry_run else 3)
                for n in counts:
                    ratio = speeds["vllm"][n] / speeds["none"][n]
                    text = f"{speeds['vllm'][n]:.0f} tokens/s aligned, {speeds['none'][n]:.0f} not, ratio {ratio:.3f}"
                    both = {align: speeds[align][n] for align in speeds}
                    self.report.add(f"{case}, {n} sequences", text, tokens_per_second=both, ratio=ratio)
                    if ON_GPU and ratio < ROLLOUT_LIMIT:
                        self.report.failures.append(f"{case}: rollouts of {n} sequences have {ratio:.3f} of the speed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layers", type=int, default=2, help="of the random model")
    parser.add_argument("--attention", choices=["FLASH_ATTN"], help="the backend of the flows without an FP8 KV cache")
    parser.add_argument("--folder", type=Path, help="keep models and runs here")
    arguments, report = start(parser, 720)
    dry_run = arguments.dry_run
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        measurement = Measurement(report, folder, 2 if dry_run else arguments.steps, dry_run, arguments.attention)
        with report.section("the tiny model", report.seconds):
            measurement.make_model()
        if report.failures:
            return report.close(arguments.json)
        for flow, kv in FLOWS[:2]:
            with report.section(f"the loop: {flow}", report.seconds):
                measurement.flow(flow, kv)
        if dry_run:
            with report.section("a flow that differs", report.seconds):
                measurement.first_difference("bf16", "bf16", False, "none")
        with report.section("speed of a larger model", report.seconds):
            write = partial(write_models, folder / "big", 1 if dry_run else arguments.layers)
            sizes = measurement.in_process(write)
            for flow in ("fp8_e2e", "bf16")[: 1 if dry_run else 2]:
                measurement.speed(flow, sizes)
        with report.section("the loop: FP8 KV cache", report.seconds):
            measurement.flow(*FLOWS[2])
        return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
