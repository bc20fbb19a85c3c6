"""LoRA on one GPU, over bases in bf16, FP8 and nvfp4_a16, against training of all weights.

    python benchmarks/gpu/lora.py [--seconds 300] [--bases bf16 fp8_e2e nvfp4_a16_e2e] [--json FILE] [--dry-run]

A random Qwen3 (4 layers of Qwen3-8B's shape) in a trainer and an engine of one process, with adapters of rank 32 on
every linear module, and then without:

mismatch    token_mult_prob_error of the engine's own samples after a training step and a refit
speed       of a training step, and tokens per second of rollouts; the ratio is what adapters cost
refits      seconds and bytes of the first, which carries the base, and of a later one
memory      GPU bytes after the trainer's setup, its peak in a step, and what the engine's setup adds beside its cache

Each case is a process of its own. --dry-run has the smallest sizes, on a CPU.
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.gpu.report import ON_GPU, Report, start

BASES = ("bf16", "fp8_e2e", "nvfp4_a16_e2e")
"""By flow, the most important first."""
RANK, PROMPT, CACHE_GIB = 32, 64, 4.0
MISMATCH_LIMIT = 1.05
"""Of token_mult_prob_error without alignment; above it trainer and engine do not compute one policy."""
SIZES: dict[bool, dict[str, Any]] = {
    True: {"sequences": [32, 256], "answer": 64, "rounds": 3, "trained": 32},
    False: {"sequences": [2], "answer": 4, "rounds": 1, "trained": 2},
}
"""By whether there is a GPU."""


def write_models(folder: Path) -> None:
    from benchmarks.measure import QWEN3_8B
    from nemo_fp8rl.commands.tiny_model import make_tiny, write_model

    make_tiny(folder, "add")
    sizes = QWEN3_8B | {"num_hidden_layers": 4, "vocab_size": 32768} if ON_GPU else {"num_hidden_layers": 2}
    write_model(folder / "big", 0, "qwen3", "cuda" if ON_GPU else "cpu", **sizes)


def allocated() -> int:
    import torch

    return torch.cuda.memory_allocated() if ON_GPU else 0


def recipe(folder: Path, flow: str, has_adapters: bool) -> list[str]:
    size, engine, peft = SIZES[ON_GPU], "policy.generation.vllm_cfg", "policy.megatron_cfg.peft"
    return [
        f"policy.model_name={folder}/big",
        f"data.train.data_path={folder}/data.jsonl",
        f"nemo_fp8rl.flow={flow}",
        "nemo_fp8rl.align=none" if ON_GPU else "nemo_fp8rl.align=auto",
        "nemo_fp8rl.refit.mode=full",
        f"policy.max_total_sequence_length={PROMPT + size['answer']}",
        f"policy.generation.max_new_tokens={size['answer']}",
        f"policy.train_global_batch_size={size['trained']}",
        f"policy.train_micro_batch_size={size['trained']}",
        f"grpo.num_prompts_per_step={size['trained'] // 2}",
        "grpo.num_generations_per_prompt=2",
        f"{engine}.kv_cache_memory_gib={CACHE_GIB if ON_GPU else 0.25}",
        f"{engine}.gpu_memory_utilization=0.3",
        *([f"{peft}.enabled=true", f"{peft}.dim={RANK}", f"{peft}.alpha={RANK}"] if has_adapters else []),
    ]


def measure(folder: Path, flow: str, has_adapters: bool) -> dict[str, Any]:
    """Return the figures of one case."""
    import torch

    from benchmarks.train_step import RECIPE, timed
    from nemo_fp8rl.algorithms.loss import NllLoss
    from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
    from nemo_fp8rl.assemble import build_bridge
    from nemo_fp8rl.batch import LossTotals, Prompt, RolloutBatch, collate
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.generation.engine_pool import EnginePool
    from nemo_fp8rl.generation.interface import Sampling
    from nemo_fp8rl.policy.rank_group import MegatronPolicy

    size, cfg = SIZES[ON_GPU], load(RECIPE, recipe(folder, flow, has_adapters))
    sampling = Sampling(num_generations=1, max_new_tokens=size["answer"], temperature=1.0, stop_token_ids=())
    generator = torch.Generator().manual_seed(0)
    policy = MegatronPolicy(cfg)
    trainer_bytes = allocated()
    engines = EnginePool(cfg)
    engine_bytes = allocated() - trainer_bytes - (int(CACHE_GIB * 2**30) if ON_GPU else 0)
    worker, engine = policy.ranks.worker, engines.engines.worker  # type: ignore[attr-defined]
    bridge = build_bridge(cfg, policy, engines)

    def answer(count: int) -> RolloutBatch:
        """Answer new prompts, which no prefix cache has."""
        ids = torch.randint(2, 60, (count, PROMPT), generator=generator).tolist()
        prompts = [Prompt(i, "", "", tuple(tokens)) for i, tokens in enumerate(ids)]
        groups = engine.generate([prompt.token_ids for prompt in prompts], [*range(count)], sampling)
        return collate(prompts, [completion for group in groups for completion in group], 0)

    def step(batch: RolloutBatch) -> None:
        worker.train_step(batch, NllLoss(), LossTotals(torch.tensor(float(batch.num_rows)), batch.token_mask.sum()))

    try:
        first = bridge.refit()
        batch = answer(size["trained"])
        step(batch)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        steps = [timed(partial(step, batch)) for _ in range(size["rounds"])]
        peak_bytes = torch.cuda.max_memory_allocated() - engine_bytes if ON_GPU else 0
        later = [bridge.refit() for _ in range(2)][-1]  # the second one has its links and compiled kernels
        sampled = answer(size["trained"])
        error = mismatch_metrics(worker.logprobs(sampled), sampled.generation_logprobs, sampled.token_mask)
        speeds = {}
        for count in size["sequences"]:
            answer(count)
            times = [timed(partial(answer, count)) for _ in range(size["rounds"])]
            speeds[count] = count * size["answer"] / median(times)
        return {
            "token_mult_prob_error": error["token_mult_prob_error"],
            "step_seconds": median(steps),
            "tokens_per_second": speeds,
            "refit_seconds": [first.seconds, later.seconds],
            "refit_bytes": [first.nbytes, later.nbytes],
            "trainer_bytes": trainer_bytes,
            "trainer_peak_bytes": peak_bytes,
            "engine_bytes": engine_bytes,
            "kernels": sorted({*policy.describe().kernels, *engines.describe().kernels}),
        }
    finally:
        engines.shutdown()
        policy.shutdown()


def line(found: dict[str, Any]) -> str:
    speeds = ", ".join(f"{speed:.0f} tokens/s of {n}" for n, speed in found["tokens_per_second"].items())
    refits = " and ".join(
        f"{nbytes / 1e6:.1f} MB in {seconds:.3f} s"
        for nbytes, seconds in zip(found["refit_bytes"], found["refit_seconds"], strict=True)
    )
    memory = "trainer {trainer_bytes:.2f} GB, peak {trainer_peak_bytes:.2f}, engine {engine_bytes:.2f}".format(
        **{name: found[name] / 1e9 for name in ("trainer_bytes", "trainer_peak_bytes", "engine_bytes")}
    )
    error = found["token_mult_prob_error"]
    return f"mismatch {error:.6f}, step {found['step_seconds']:.3f} s, {speeds}; refits {refits}; {memory}"


def compare(report: Report, folder: Path, flow: str) -> None:
    """Add the lines of one base: adapters, all weights, and their ratios."""
    results = {}
    for label, has_adapters in (("adapters", True), ("all weights", False)):
        if not report.has_time():
            continue
        with report.guard(label), ProcessPoolExecutor(1, get_context("spawn")) as process:
            found = results[label] = process.submit(measure, folder, flow, has_adapters).result()
            report.add(label, line(found), **found)
            if found["token_mult_prob_error"] > MISMATCH_LIMIT:
                report.failures.append(f"{flow}, {label}: token_mult_prob_error is above {MISMATCH_LIMIT}")
    if len(results) == 2:
        adapted, whole = results.values()
        speeds = {n: speed / whole["tokens_per_second"][n] for n, speed in adapted["tokens_per_second"].items()}
        ratios = {
            "step": adapted["step_seconds"] / whole["step_seconds"],
            "later refit's bytes": adapted["refit_bytes"][1] / whole["refit_bytes"][1],
        }
        text = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        text += ", rollout " + ", ".join(f"{ratio:.2f} of {n} sequences" for n, ratio in speeds.items())
        report.add("adapters / all weights", text, ratios=ratios, rollout=speeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", nargs="+", choices=BASES, default=[*BASES], help="by flow")
    arguments, report = start(parser, seconds=300)
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(write_models, Path(folder)).result()
        for i, flow in enumerate(arguments.bases):
            with report.section(flow, report.seconds_left() / (len(arguments.bases) - i)):
                compare(report, Path(folder), flow)
        return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
