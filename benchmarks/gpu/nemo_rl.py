"""NeMo RL's Llama-3.1-8B FP8 recipe on one node of 8 GPUs, with and without this package: refits, mismatch, steps.

    NEMO_RL_SRC=RL python benchmarks/gpu/nemo_rl.py [--seconds 900] [--steps 8] [--model FOLDER] [--folder runs/nemo_rl]
        [--python "uv run python"] [--json FILE] [--dry-run]

Four GPUs train and four sample, by NeMo RL's own workers in every variant:

    NeMo RL alone           examples/run_grpo.py of the checkout: its engines quantize what they get
    FP8 over its transport  `nemo-fp8rl nemo`, and nemo_fp8rl.refit.transport=nemo_rl
    checkpoint engine       `nemo-fp8rl nemo` as it chooses: FP8, deltas, digests, versions

Each variant has --seconds at most; what it has logged until then counts. The numbers are medians of the last two thirds
of its steps, read from NeMo RL's TensorBoard files. --python is the command that runs Python in NeMo RL's environment,
such as "uv run python". --dry-run prints the commands and checks every key against the checkout; it needs no GPU.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.report import ON_GPU, Report
from nemo_fp8rl.nemo_rl.interface_check import check_interface
from nemo_fp8rl.nemo_rl.recipe.checkout import NEMO_RL_SRC, find_checkout
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import check_loop
from nemo_fp8rl.nemo_rl.stock.refit_choice import choose_refit
from nemo_fp8rl.nemo_rl.stock.stock_limits import check_stock

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "examples/configs/recipes/llm/grpo-llama3.1-8b-instruct-2n8g-megatron-fp8-e2e.yaml"
SIZES = (
    "cluster.num_nodes=1",
    "cluster.gpus_per_node=8",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=4",
    "grpo.num_prompts_per_step=16",
    "grpo.num_generations_per_prompt=16",
    "policy.train_global_batch_size=256",
    "policy.max_total_sequence_length=2048",
    "policy.generation.max_new_tokens=1024",
    "policy.generation.vllm_cfg.max_model_len=2048",
    "data.max_input_seq_length=1024",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "checkpointing.enabled=false",
    "logger.wandb_enabled=false",
    "logger.tensorboard_enabled=true",
    "logger.monitor_gpus=false",
)
"""One node, and steps short enough that several fit into the time of a variant."""
METRICS = {
    "refit_seconds": "timing/train/prepare_for_generation/transfer_and_update_weights",
    "step_seconds": "timing/train/total_step_time",
    "token_mult_prob_error": "train/token_mult_prob_error",
    "refit_bytes": "refit/bytes",
    "wire_over_bf16": "refit/wire_over_bf16",
    "delta_share": "refit/delta",
}
"""Name in the results -> NeMo RL's name; those of `refit/` are of our checkpoint engine alone."""


@dataclass(frozen=True)
class Variant:
    """A way to run the recipe.

    ours:       by `nemo-fp8rl nemo`, else by NeMo RL's own script
    overrides:  further ones
    carrier:    what `nemo-fp8rl nemo` says about the refits
    """

    name: str
    ours: bool
    overrides: tuple[str, ...] = ()
    carrier: str = ""


VARIANTS = (
    Variant("NeMo RL alone", ours=False),
    Variant(
        "FP8 over its transport",
        ours=True,
        overrides=("++nemo_fp8rl.workers=nemo_rl", "++nemo_fp8rl.refit.transport=nemo_rl"),
        carrier="refits go by NeMo RL's own transport",
    ),
    Variant(
        "checkpoint engine",
        ours=True,
        overrides=("++nemo_fp8rl.workers=nemo_rl",),
        carrier="refits go by our checkpoint engine",
    ),
)


def overrides_of(variant: Variant, steps: int, logs: Path, model: str | None) -> list[str]:
    models = [f"policy.model_name={model}", f"policy.tokenizer.name={model}"] if model else []
    return [*SIZES, *models, f"grpo.max_num_steps={steps}", f"logger.log_dir={logs}", *variant.overrides]


def command_of(variant: Variant, python: list[str], checkout: Path, overrides: list[str]) -> list[str]:
    """Return the command of a run; NeMo RL's script begins in the checkout, where its prompt files are."""
    program = ["-m", "nemo_fp8rl.cli", "nemo"] if variant.ours else [str(checkout / "examples/run_grpo.py")]
    return [*python, *program, "--config", str(checkout / RECIPE), *overrides]


def check(variant: Variant, recipe: Path, overrides: list[str]) -> str:
    """Check what `nemo-fp8rl nemo` checks before it starts Ray, and return who carries the refits.

    Raises: UserError, naming the key; RuntimeError if somebody else than the variant's carrier does
    """
    loaded = load_recipe(recipe, overrides)
    check_loop(loaded.values)
    check_interface(loaded.checkout, uses_package=False)
    if not variant.ours:
        return "refits go by NeMo RL's broadcast in BF16"
    check_stock(loaded.values, loaded.checkout.engines_survive_fp8_refit)
    nodes, policy = loaded.values["cluster"]["num_nodes"], loaded.values["policy"]
    carrier = choose_refit(policy, loaded.fp8rl.refit, nodes, loaded.checkout.has_checkpoint_engines)
    if not carrier.startswith(variant.carrier):
        raise RuntimeError(carrier)
    return carrier


def read_metrics(logs: Path) -> dict[str, float]:
    """Return the medians of METRICS over the last two thirds of a run's steps, without what it did not log.

    logs: logger.log_dir, in which NeMo RL makes a folder exp_001 and so on for each attempt
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted(max(logs.glob("exp_*")).rglob("events*tfevents*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            values[name] |= {event.step: event.value for event in events.Scalars(name)}
    found = {"steps": float(len(values[METRICS["step_seconds"]]))}
    for name, of_nemo_rl in METRICS.items():
        by_step = [values[of_nemo_rl][step] for step in sorted(values[of_nemo_rl])]
        if by_step:
            found[name] = median(by_step[len(by_step) // 3 :])
    return found


def describe(found: Mapping[str, float]) -> str:
    names = {
        "refit_seconds": "refit {:.2f} s",
        "refit_bytes": "{:.4g} bytes to all receivers",
        "delta_share": "{:.0%} deltas",
        "token_mult_prob_error": "token_mult_prob_error {:.4f}",
        "step_seconds": "step {:.1f} s",
    }
    return ", ".join(text.format(found[name]) for name, text in names.items() if name in found)


def measure(report: Report, variant: Variant, command: list[str], logs: Path, seconds: float) -> None:
    """Run a variant and add its line; raises RuntimeError, with the end of the log, if it took no step."""
    checkout = find_checkout().root.resolve()
    paths = [str(checkout), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    logs.mkdir(parents=True)
    with (logs / "output.txt").open("wb") as output:
        run = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=checkout, env=environment, start_new_session=True
        )
        try:
            run.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(run)
    found = read_metrics(logs) if any(logs.glob("exp_*")) else {"steps": 0.0}
    if not found["steps"]:
        end = (logs / "output.txt").read_text(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"no step in {seconds:.0f} s: {' '.join(end)[-280:]}")
    report.add(variant.name, f"{describe(found)} ({found['steps']:.0f} steps)", **found)


def stop(run: "subprocess.Popen[bytes]") -> None:
    """End a run and what it started on this machine: by a signal that its loop may obey, then by force."""
    for end, wait in ((signal.SIGTERM, 60.0), (signal.SIGKILL, 10.0)):
        os.killpg(run.pid, end)
        try:
            run.wait(wait)
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900, help="time limit of a variant")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", help="folder or name, in place of meta-llama/Llama-3.1-8B-Instruct")
    parser.add_argument("--python", default=sys.executable, help="command that runs Python in NeMo RL's environment")
    parser.add_argument("--folder", type=Path, help="keep logs here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.dry_run or ON_GPU):
        parser.error("there is no GPU; --dry-run prints the commands and checks every key on a CPU")
    checkout = find_checkout().root.resolve()
    os.environ[NEMO_RL_SRC] = str(checkout)
    report = Report(arguments.seconds * len(VARIANTS))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        for variant in VARIANTS:
            logs = folder / variant.name.replace(" ", "_")
            overrides = overrides_of(variant, arguments.steps, logs, arguments.model)
            command = command_of(variant, shlex.split(arguments.python), checkout, overrides)
            with report.section(variant.name, arguments.seconds):
                carrier = check(variant, checkout / RECIPE, overrides)
                report.add(f"{variant.name}, command", shlex.join(command), command=command, carrier=carrier)
                if not arguments.dry_run:
                    measure(report, variant, command, logs, arguments.seconds)
        return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
