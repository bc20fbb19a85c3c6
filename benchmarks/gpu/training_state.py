"""Optimizer states of few bytes on one GPU: memory, time, and whether the CPU's AdamW has the same states.

    python benchmarks/gpu/training_state.py [--seconds 300] [--json FILE] [--dry-run]

memory  a trainer of 4 layers of Qwen3-8B's shape in bf16, for each combination of dtypes, each in its own process:
        bytes of a parameter between steps, counted from tensors; GPU bytes between steps; what the optimizer's step
        needs beside them at its peak; its seconds
states  `ScaledAdamW` on the CPU against Transformer Engine's FusedAdam on the GPU after a few steps: the share of equal
        values of weights, masters and moments, for all combinations. The kernel may fuse a product and a sum, so
        that a last bit may differ
zeros   moments of zeros, and of values so small that their scale has no finite reciprocal: NaNs in FusedAdam and in
        the class that the trainer uses

--dry-run has the smallest sizes, on a CPU; there FusedAdam is missing.
"""

import argparse
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.gpu.report import DEVICE, MISSING, ON_GPU, Report, equal_share, percent, start

GRADIENTS = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false"
OPTIMIZER = "policy.megatron_cfg.optimizer"


def states_of(mean: str, square: str, master: str = "fp32", remainders: bool = True) -> tuple[str, ...]:
    """Return the keys of a combination of dtypes."""
    names = {"exp_avg_dtype": mean, "exp_avg_sq_dtype": square, "main_params_dtype": master}
    names |= {"store_param_remainders": str(remainders).lower(), "use_precision_aware_optimizer": "true"}
    return tuple(f"{OPTIMIZER}.{name}={value}" for name, value in names.items())


CASES: dict[str, tuple[tuple[str, ...], float]] = {
    "default": ((), 18),
    "bf16 gradients": ((GRADIENTS,), 16),
    "remainders": (states_of("fp32", "fp32"), 16),
    "remainders, bf16 moments": (states_of("bf16", "bf16"), 12),
    "the same, bf16 gradients": ((*states_of("bf16", "bf16"), GRADIENTS), 10),
    "remainders, fp8 and fp16 moments": (states_of("fp8", "fp16"), 11),
    "the same two, bf16 gradients": ((*states_of("fp8", "fp16"), GRADIENTS), 9),
    "remainders, fp8 moments, bf16 gradients": ((*states_of("fp8", "fp8"), GRADIENTS), 8),
    "fp16 masters, fp8 and fp16 moments": (states_of("fp8", "fp16", "fp16"), 11),
}
"""Keys of a combination, and the bytes of a parameter between steps that they should leave."""
MASTERS = {"remainders": ("fp32", True), "fp32": ("fp32", False), "fp16": ("fp16", False)}
STEPS = 4


def write_models(folder: Path) -> None:
    from benchmarks.measure import QWEN3_8B
    from nemo_fp8rl.commands.tiny_model import make_tiny, write_model

    make_tiny(folder, "add")
    sizes = QWEN3_8B | {"num_hidden_layers": 4, "vocab_size": 32768} if ON_GPU else {"num_hidden_layers": 2}
    write_model(folder / "big", 0, "qwen3", DEVICE, **sizes)


def measure(folder: Path, keys: tuple[str, ...]) -> dict[str, float]:
    """Return the figures of one combination."""
    import torch

    from benchmarks.measure import trained_bytes
    from benchmarks.train_step import RECIPE, timed
    from nemo_fp8rl.algorithms.loss import NllLoss
    from nemo_fp8rl.batch import LossTotals, RolloutBatch
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.policy.rank.worker import MegatronWorker

    paths = (f"policy.model_name={folder}/big", f"data.train.data_path={folder}/data.jsonl")
    sizes = ("policy.train_global_batch_size=2", "policy.train_micro_batch_size=2", "grpo.num_prompts_per_step=1")
    sizes += ("grpo.num_generations_per_prompt=2", f"{OPTIMIZER}.lr=1e-5", "nemo_fp8rl.align=none")
    worker = MegatronWorker()
    worker.setup(load(RECIPE, [*paths, *sizes, "nemo_fp8rl.flow=bf16", *keys]), 0, 1, None)
    ids, ones = torch.randint(2, 60, (2, 64)), torch.ones(2, 64)
    batch = RolloutBatch(
        input_ids=ids,
        input_lengths=torch.tensor([64, 64]),
        token_mask=ones,
        sample_mask=torch.ones(2),
        generation_logprobs=torch.zeros(2, 64),
    )
    inner, times, peaks = worker.optimizer.step, [], []

    def step() -> Any:
        answer: list[Any] = []
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        times.append(timed(lambda: answer.append(inner())))
        peaks.append(torch.cuda.max_memory_allocated() - before if ON_GPU else 0)
        return answer[0]

    worker.optimizer.step = step
    try:
        for _ in range(5 if ON_GPU else 2):
            worker.train_step(batch, NllLoss(), LossTotals(torch.tensor(2.0), ones.sum()))
        return {
            "bytes_of_a_parameter": trained_bytes(worker),
            "parameters": float(sum(p.numel() for p in worker.model.parameters())),
            "resident_bytes": float(torch.cuda.memory_allocated() if ON_GPU else 0),
            "step_bytes": float(max(peaks[1:])),
            "step_seconds": median(times[1:]),
        }
    finally:
        worker.shutdown()


def show_memory(report: Report, folder: Path) -> None:
    for case, (keys, expected) in CASES.items():
        if not report.has_time():
            continue
        with report.guard(case), ProcessPoolExecutor(1, get_context("spawn")) as process:
            found = process.submit(measure, folder, keys).result()
            text = "{bytes_of_a_parameter:.2f} bytes a parameter, step {step_seconds:.4f} s".format(**found)
            beside = found["step_bytes"] / found["parameters"]
            text += f", resident {found['resident_bytes'] / 1e9:.2f} GB, a step's peak {beside:.2f} bytes more"
            report.add(case, text, expected=expected, **found)
            if abs(found["bytes_of_a_parameter"] - expected) > 0.02 * expected:
                report.failures.append(f"{case}: expected {expected} bytes a parameter")


def fused_adam(kind: Any, pieces: list[Any], mean: str, square: str, master: str, remainders: bool) -> Any:
    from nemo_fp8rl.policy.optimizer.scaled_adam import DTYPES

    return kind(
        [{"params": pieces}], **HYPERPARAMETERS, master_weights=True, use_decoupled_grad=True,
        master_weight_dtype=DTYPES[master], exp_avg_dtype=DTYPES[mean], exp_avg_sq_dtype=DTYPES[square],
        store_param_remainders=remainders,
    )  # fmt: skip


HYPERPARAMETERS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def compare_states(report: Report) -> None:
    """Add a line for each combination."""
    import torch

    from nemo_fp8rl.policy.optimizer.fused_adam import MASTER_STATE, FiniteFusedAdam
    from nemo_fp8rl.policy.optimizer.scaled_adam import DTYPES, MASTER, MOMENTS, ScaledAdamW

    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1 << 18, generator=generator).mul_(0.02).bfloat16()
    gradients = [torch.randn(weights.shape, generator=generator) * 1e-3 for _ in range(STEPS)]
    for mean, square, (master, (dtype, remainders)) in product(DTYPES, DTYPES, MASTERS.items()):
        if not report.has_time():
            continue
        case = f"{mean} and {square}, masters: {master}"
        with report.guard(case):
            here, there = weights.clone(), weights.to(DEVICE)
            dtypes = {"exp_avg": DTYPES[mean], "exp_avg_sq": DTYPES[square], MASTER: DTYPES[dtype]}
            ours = ScaledAdamW([{"params": [here], **HYPERPARAMETERS}], dtypes, remainders)
            theirs = fused_adam(FiniteFusedAdam, [there], mean, square, dtype, remainders)
            for gradient in gradients:
                here.decoupled_grad, there.decoupled_grad = gradient, gradient.to(DEVICE)  # type: ignore[attr-defined]
                ours.step()
                theirs.step()
            shares = {"weights": equal_share(here, there.cpu())}
            for kind in (MASTER, *MOMENTS):
                shares[kind] = equal_share(ours.read(here, kind), theirs.read(there, kind).cpu())
            differences = (ours.read(here, MASTER) - theirs.read(there, MASTER).cpu()).abs()
            largest = float(differences.max())
            text = ", ".join(f"{kind} {percent(share)}" for kind, share in shares.items())
            stored = theirs.state[there][MASTER_STATE].dtype
            report.add(case, f"{text}, masters apart at most {largest:.1e}", equal=shares, stored=str(stored))


def show_zeros(report: Report) -> None:
    """Add a line for each class and each kind of small moment."""
    import torch

    from nemo_fp8rl.policy.optimizer.fused_adam import FiniteFusedAdam, FusedAdam

    for kind, value in product((FusedAdam, FiniteFusedAdam), (0.0, 1e-41)):
        case = f"{kind.__name__}, moments of {value:g}"
        with report.guard(case):
            piece = torch.ones(1000, device=DEVICE, dtype=torch.bfloat16)
            piece.decoupled_grad = torch.zeros(1000, device=DEVICE)  # type: ignore[attr-defined]
            adam = fused_adam(kind, [piece], "fp8", "fp16", "fp32", True)
            adam.step()
            moments = torch.full((1000,), value, device=DEVICE)
            moments[0] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                adam.set_scaled_state(piece, name, moments.clone())
            adam.step()
            counts = {n: int(adam.get_unscaled_state(piece, n).isnan().sum()) for n in ("exp_avg", "exp_avg_sq")}
            counts["weights"] = int(piece.isnan().sum())
            report.add(case, ", ".join(f"{count} NaNs in {name}" for name, count in counts.items()), nans=counts)
            if kind is FiniteFusedAdam and any(counts.values()):
                report.failures.append(case)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments, report = start(parser, seconds=300)
    for name, show in (("zeros", show_zeros), ("states", compare_states)):
        with report.section(name, report.seconds_left() / 4):
            try:
                show(report)
            except MISSING as error:
                report.leave_out("Transformer Engine", error)
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(write_models, Path(folder)).result()
        with report.section("memory", report.seconds_left()):
            show_memory(report, Path(folder))
    return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
