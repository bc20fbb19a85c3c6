"""What rollout correction and the GRPO loss cost beside a memcpy of what they read and write, and beside whole-tensor
formulations as other frameworks have them.

    python benchmarks/loss.py [--rows 512] [--columns 4096] [--rounds 7] [--json FILE]

float32 log-probs [rows, columns] on the CPU, one thread. A pass is the time in which the bytes of a call's inputs and
outputs can be copied, half of them read and half of them written, into memory that is there; each timing has its own
just before it, and the table shows medians. Memory is the growth of the process's peak beyond inputs and results, in
units of the inputs. Results go to benchmarks/results/loss_cpu.json unless --json says otherwise.
"""

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import peak_growth, seconds
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nemo_fp8rl.algorithms.correction import correct, correct_batch
from nemo_fp8rl.algorithms.correction_config import PRESETS
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.batch import LossTotals, ScoredBatch
from nemo_fp8rl.common.machine import machine

RESULTS = Path(__file__).resolve().parent / "results" / "loss_cpu.json"
DEMO = {"rows": 512, "columns": 22, "step_seconds": 0.3}
"""A step of conf/tiny_cpu.yaml on the machine of the README: samples, prompt + answer at most, its training phase."""
OURS = ("none", "tis", "seq-tis", "icepop", "seq-mask-tis", "k3-rs", "veto", "ipo")
LOSS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 2.0,
}


@dataclass(frozen=True)
class Case:
    """A call, the bytes that it must read and write, and the bytes of its results that stay."""

    call: Callable[[], Any]
    reads: int
    writes: int
    ours: bool = True


def masked_mean(values: Tensor, mask: Tensor, total: Tensor | None = None, dim: int | None = None) -> Tensor:
    return (values * mask).sum(dim) / ((mask.sum(dim) if total is None else total) + 1e-8)


def whole_tensor_tis(prev: Tensor, gen: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, ...]:
    """As NeMo RL's loss computes weights, their mean and the share out of bounds; also zeroed outside the mask."""
    weights = torch.exp(prev - gen)
    weights = torch.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)
    outside = masked_mean(((weights > cap) | (weights < 0.0)).float(), mask)
    weights = torch.clamp(weights, min=0.0, max=cap)
    return weights * mask, masked_mean(weights, mask), outside


def whole_tensor_sequence_mask(prev: Tensor, gen: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, ...]:
    """As NeMo RL's seq-mask-tis."""
    weights = torch.nan_to_num(torch.exp(prev - gen), nan=0.0, posinf=0.0, neginf=0.0)
    log_ratio = torch.nan_to_num(prev - gen, nan=0.0, posinf=0.0, neginf=0.0)
    ratio = torch.exp(masked_mean(log_ratio, mask, dim=-1))
    kept = ((ratio >= low) & (ratio <= high)).float()
    weights = weights * kept.unsqueeze(-1)
    return weights * mask, masked_mean(weights, mask), 1.0 - kept.mean()


def whole_tensor_with_metrics(prev: Tensor, gen: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """As verl's correction: weights, a rejection mask by k3, and its metrics, each from the whole tensors."""
    log_ratio = torch.clamp(prev - gen, min=-20.0, max=20.0)
    weights = torch.exp(log_ratio) * mask
    k3 = torch.exp(log_ratio) - log_ratio - 1
    kept = (masked_mean(k3, mask, dim=-1, total=None) <= 0.01).float().unsqueeze(-1) * mask
    normalized = weights / masked_mean(weights, mask)
    metrics = {
        "mean": masked_mean(weights, mask),
        "max": weights.masked_fill(mask == 0, -torch.inf).max(),
        "min": weights.masked_fill(mask == 0, torch.inf).min(),
        "std": (masked_mean(weights.square(), mask) - masked_mean(weights, mask).square()).clamp(min=0).sqrt(),
        "high": masked_mean((weights > cap).float(), mask),
        "low": masked_mean((weights < 1 / cap).float(), mask),
        "ess": 1 / masked_mean(normalized.square(), mask),
        "rejected": 1 - masked_mean(kept, mask),
        "k1": masked_mean(gen - prev, mask),
        "k3": masked_mean(k3, mask),
        "ppl": torch.exp(-masked_mean(prev, mask, dim=-1)).mean(),
        "rollout_ppl": torch.exp(-masked_mean(gen, mask, dim=-1)).mean(),
        "chi2": masked_mean(weights.square(), mask) - 1,
    }
    return weights.clamp(max=cap) * kept, metrics


def whole_tensor_loss(curr: Tensor, batch: ScoredBatch, totals: LossTotals) -> tuple[Tensor, dict]:
    """As NeMo RL's ClippedPGLossFn with tis and a k3 KL, operation by operation."""
    advantages, prev, gen = batch.advantages[:, 1:], batch.prev_logprobs[:, 1:], batch.generation_logprobs[:, 1:]
    reference = batch.reference_policy_logprobs[:, 1:]
    mask, tokens = batch.token_mask[:, 1:] * batch.sample_mask.unsqueeze(-1), totals.valid_toks

    def mean(values: Tensor) -> Tensor:
        return masked_mean(values, mask, tokens)

    def k3(log_ratio: Tensor) -> Tensor:
        return torch.exp(log_ratio) - 1 - log_ratio

    mixture = torch.log(0.5 * torch.exp(prev) + 0.5 * torch.exp(gen))
    to_mixture = [torch.exp(x - mixture) - (x - mixture) - 1 for x in (prev, gen)]
    metrics = {
        "token_mult_prob_error": mean(torch.exp(torch.abs(gen - prev) * mask)).item(),
        "gen_kl_error": mean(k3(prev - gen)).item(),
        "policy_kl_error": mean(k3(gen - prev)).item(),
        "js_divergence_error": mean(0.5 * to_mixture[0] + 0.5 * to_mixture[1]).item(),
    }
    kl_weights = torch.nan_to_num(torch.exp(curr - curr.detach()), nan=0.0, posinf=0.0, neginf=0.0)
    log_ratio = reference - curr
    clamped = log_ratio.clamp(min=-20.0, max=20.0)
    kl_weights = torch.where(log_ratio == clamped, kl_weights, kl_weights.detach())
    kl = mean(0.01 * torch.clamp(kl_weights * k3(clamped), min=-10.0, max=10.0))
    ratios = (curr - prev).exp()
    clipped = ratios.clamp(0.8, 1.2)
    surrogate = torch.max(-advantages * ratios, -advantages * clipped)
    weights = torch.nan_to_num(torch.exp(prev - gen), nan=0.0, posinf=0.0, neginf=0.0)
    metrics["is_oob_ratio"] = mean(((weights > 2.0) | (weights < 0.0)).float()).item()
    weights = torch.clamp(weights, min=0.0, max=2.0)
    loss = mean(weights * surrogate) + kl
    with torch.no_grad():
        metrics |= {
            "approx_entropy": -mean(torch.exp(curr - gen) * curr).item(),
            "sampling_importance_ratio": mean(weights).item(),
            "probs_ratio": mean(ratios).item(),
            "probs_ratio_clamped": mean(clipped).item(),
        }
        for name, values in (("probs_ratio", ratios), ("probs_ratio_clamped", clipped)):
            chosen = values[mask.bool()]
            metrics |= {f"{name}_min": chosen.min().item(), f"{name}_max": chosen.max().item()}
    return loss, metrics


def make(rows: int, columns: int) -> tuple[Tensor, ScoredBatch]:
    """(current log-probs, batch): prompts of a sixteenth, answers of any length, policies a few per cent apart."""
    gen = -torch.rand(rows, columns) * 3
    prev = gen + torch.randn(rows, columns) * 0.03
    curr = prev[:, 1:] + torch.randn(rows, columns - 1) * 0.03
    start = max(1, columns // 16)
    lengths = torch.randint(start + 1, columns + 1, (rows,))
    position = torch.arange(columns)
    batch = ScoredBatch(
        input_ids=torch.zeros(rows, columns, dtype=torch.int64),
        input_lengths=lengths,
        token_mask=((position >= start) & (position < lengths[:, None])).float(),
        sample_mask=torch.ones(rows),
        rewards=torch.zeros(rows),
        advantages=torch.randn(rows, 1).expand(rows, columns).contiguous(),
        generation_logprobs=gen,
        prev_logprobs=prev,
        reference_policy_logprobs=prev + torch.randn(rows, columns) * 0.1,
    )
    return curr.requires_grad_(), batch


def cases(rows: int, columns: int) -> dict[str, Case]:
    curr, batch = make(rows, columns)
    prev, gen, mask = batch.prev_logprobs, batch.generation_logprobs, batch.token_mask
    plane = prev.numel() * 4  # bytes of one [rows, columns] float32
    totals = LossTotals((mask.sum(-1) > 0).sum().float(), mask[:, 1:].sum())
    ours = GrpoLoss(LossConfig(**LOSS))
    weighted, _ = correct_batch(batch, ours.correction)

    def backward(loss: Callable[..., tuple[Tensor, Any]], data: ScoredBatch) -> Tensor:
        curr.grad = None
        loss(curr, data, totals)[0].backward()
        return curr.grad

    made = {
        f"correct, {name}": Case(lambda name=name: correct(prev, gen, mask, PRESETS[name]), 3 * plane, plane * 3 // 2)
        for name in OURS
    }
    return {
        **made,
        "correct_batch, tis": Case(lambda: correct_batch(batch, PRESETS["tis"]), 3 * plane, plane),
        "whole tensors, tis (NeMo RL)": Case(
            lambda: whole_tensor_tis(prev, gen, mask, 2.0), 3 * plane, plane, ours=False
        ),
        "whole tensors, seq-mask-tis (NeMo RL)": Case(
            lambda: whole_tensor_sequence_mask(prev, gen, mask, 0.999, 1.002), 3 * plane, plane, ours=False
        ),
        "whole tensors, tis + k3 + metrics (verl)": Case(
            lambda: whole_tensor_with_metrics(prev, gen, mask, 2.0), 3 * plane, plane, ours=False
        ),
        "GrpoLoss, weights of the batch": Case(lambda: ours(curr, weighted, totals), 7 * plane, 0),
        "GrpoLoss": Case(lambda: ours(curr, batch, totals), 6 * plane, 0),
        "GrpoLoss + backward": Case(lambda: backward(ours, batch), 6 * plane, plane),
        "whole tensors, loss (NeMo RL)": Case(lambda: whole_tensor_loss(curr, batch, totals), 6 * plane, 0, ours=False),
        "whole tensors, loss + backward (NeMo RL)": Case(
            lambda: backward(whole_tensor_loss, batch), 6 * plane, plane, ours=False
        ),
    }


def memcpy_of(size: int) -> Callable[[], Any]:
    source = torch.zeros(size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def measure(rows: int, columns: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = {}
    for name, case in cases(rows, columns).items():
        copy = memcpy_of((case.reads + case.writes) // 2)
        case.call()
        times, passes = [], []
        for _ in range(rounds):
            one_pass = min(seconds(copy) for _ in range(3))
            times.append(seconds(case.call))
            passes.append(times[-1] / one_pass)
        del copy
        table[name] = {
            "ms": median(times) * 1e3,
            "best_ms": min(times) * 1e3,
            "passes": median(passes),
            "extra_memory": max(0, peak_growth(case.call) - case.writes) / case.reads,
            "ours": case.ours,
        }
    return table


def demo_share() -> dict[str, float]:
    """The correction of a step of the demo, beside its training phase."""
    _, batch = make(int(DEMO["rows"]), int(DEMO["columns"]))
    correct_batch(batch, PRESETS["tis"])
    cost = median(seconds(lambda: correct_batch(batch, PRESETS["tis"])) for _ in range(20))
    return {"ms": cost * 1e3, "share": cost / DEMO["step_seconds"]}


def show(result: dict[str, Any]) -> None:
    table = Table("", "ms", "passes", "extra memory", title=f"[{result['rows']}, {result['columns']}], one thread")
    for name, row in result["cases"].items():
        if name.startswith(("whole tensors, tis (", "GrpoLoss, ", "whole tensors, loss (")):
            table.add_section()
        table.add_row(name, f"{row['ms']:.1f}", f"{row['passes']:.1f}", f"{row['extra_memory']:.2f} x inputs")
    console = Console()
    console.print(table)
    demo = result["demo"]
    console.print(f"a step of the demo: correct_batch takes {demo['ms']:.2f} ms, {demo['share']:.2%} of its training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.columns < 3:
        parser.error("--rows must be 1 or more and --columns 3 or more: a prompt token and an answer")
    result = {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": arguments.rows,
        "columns": arguments.columns,
        "cases": measure(arguments.rows, arguments.columns, arguments.rounds),
        "demo": demo_share(),
    }
    show(result)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
