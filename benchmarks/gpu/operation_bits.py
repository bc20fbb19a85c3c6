"""The shared operations on a GPU against their formulas, which torch computes on the CPU.

The operations consist of IEEE operations in a written order, so a GPU must give the formula's bits. That is the
strongest check of all: it needs no second GPU and no other library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.report import DEVICE, Report, equal_share, milliseconds, percent, relative_error
from nemo_fp8rl.ops.activation import silu_mul
from nemo_fp8rl.ops.experts import choose_experts, combine
from nemo_fp8rl.ops.log_softmax import log_softmax
from nemo_fp8rl.ops.norm import add_rms_norm, rms_norm
from nemo_fp8rl.ops.rank_sum import sum_in_rank_order
from nemo_fp8rl.ops.rope import rotate
from tests.gpu_engine import torch_formulas as formulas

EPS = 1e-6
TOP_K = 8


@dataclass
class Case:
    """One operation on rows.

    rows:      tensors, whose dimension `dim` is the rows
    fixed:     the other arguments
    ours:      (*rows, *fixed) -> a tensor, or several, with the rows first
    formula:   the same, on the CPU
    torchs:    what torch has for it, for its time
    checked:   number of rows that are compared with the formula, which is slow
    """

    rows: tuple[Tensor, ...]
    fixed: tuple[Any, ...]
    ours: Callable[..., Any]
    formula: Callable[..., Any]
    torchs: Callable[..., Any]
    checked: int = 64
    dim: int = 0

    def part(self, start: int, end: int) -> list[Tensor]:
        """Return rows start to end of the arguments."""
        return [t.narrow(self.dim, start, end - start) for t in self.rows]


def values(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def rope_table(length: int, d: int, dtype: torch.dtype) -> Tensor:
    """Return cosines, then sines, [length, d], computed on the host as trainer and engine do."""
    angles = torch.outer(torch.arange(length).float(), 1.0e6 ** -(torch.arange(0, d, 2) / d))
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype).to(DEVICE)


def joined(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return one tensor, with the rows first, of all that an operation returns."""
    return result if isinstance(result, Tensor) else torch.stack(result, 1)


def torchs_rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    cos, sin = table[positions][:, None].chunk(2, -1)
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def torchs_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def choose(logits: Tensor) -> Tensor:
    """Return weights and numbers of the chosen experts, side by side."""
    weights, ids = choose_experts(logits, TOP_K, True)
    return torch.cat((weights, ids.float()), -1)


def formula_choose(logits: Tensor) -> Tensor:
    x = logits.float()
    values, ids = x.sort(dim=-1, descending=True, stable=True)
    largest = values[:, :1]
    parts = formulas.exp(values[:, :TOP_K] - largest) / formulas.tree_sum(formulas.exp(x - largest))[:, None]
    total = torch.zeros(len(x))
    for part in parts.unbind(-1):
        total = total + part
    return torch.cat((parts / total[:, None], ids[:, :TOP_K].float()), -1)


def torchs_choose(logits: Tensor) -> Tensor:
    weights, ids = logits.float().softmax(-1).topk(TOP_K)
    return torch.cat((weights / weights.sum(-1, keepdim=True), ids.float()), -1)


def formula_combine(y: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids.argsort(-1)
    total = torch.zeros(len(y), y.size(-1))
    for slot in order.unbind(-1):
        row = torch.arange(len(y))
        total = formulas.fma(weights[row, slot][:, None], y[row, slot].float(), total)
    return total.to(y.dtype)


def cases_of_experts(dry_run: bool) -> dict[str, Case]:
    """Return the operations of a mixture around its products, in the sizes of Qwen3-30B-A3B."""
    m, hidden = (65, 192) if dry_run else (16384, 2048)
    logits, y = values(m, 128, seed=11), values(m, TOP_K, hidden, seed=12)
    weights, ids = values(m, TOP_K, seed=13, dtype=torch.float32).abs(), logits.topk(TOP_K).indices
    return {
        "choose_experts bf16": Case((logits,), (), choose, formula_choose, torchs_choose),
        "combine bf16": Case(
            (y, weights, ids),
            (),
            lambda y, weights, ids: combine(y.flatten(0, 1), weights, ids),
            formula_combine,
            lambda y, weights, ids: (y * weights[..., None]).sum(1),
        ),
    }


def cases(dry_run: bool) -> dict[str, Case]:
    """Return the operations by name, in the sizes of Qwen3-8B."""
    m, hidden, heads, d, inner, vocabulary = (
        (65, 256, 6, 64, 192, 1500) if dry_run else (16384, 4096, 40, 128, 12288, 0)
    )
    vocabulary, logit_rows = vocabulary or 151_936, 9 if dry_run else 512
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        kind = "bf16" if dtype == torch.bfloat16 else "fp32"
        weight = 1 + values(hidden, seed=1, scale=0.1).to(dtype)
        head_weight = 1 + values(d, seed=2, scale=0.1).to(dtype)
        x, residual = (values(m, hidden, seed=seed, scale=3, dtype=dtype) for seed in (3, 4))
        queries, gate_up = values(m, heads, d, seed=5, dtype=dtype), values(m, 2 * inner, seed=6, scale=4, dtype=dtype)
        positions = torch.arange(m, device=DEVICE) % 4096
        table, parts = rope_table(4096, d, dtype), values(8, m, hidden, seed=7, scale=100, dtype=dtype)

        def norm_of(x: Tensor, weight: Tensor) -> Tensor:
            return rms_norm(x, weight, EPS)

        def formula_of(x: Tensor, weight: Tensor) -> Tensor:
            return formulas.rms_norm(x, weight, EPS)

        def torchs_norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, weight.shape, weight, EPS)

        found |= {
            f"rms_norm {kind}": Case((x,), (weight,), norm_of, formula_of, torchs_norm),
            f"rms_norm of heads {kind}": Case((queries,), (head_weight,), norm_of, formula_of, torchs_norm),
            f"add_rms_norm {kind}": Case(
                (x, residual),
                (weight,),
                lambda x, r, w: add_rms_norm(x, r, w, EPS),
                lambda x, r, w: formulas.add_rms_norm(x, r, w, EPS),
                lambda x, r, w: (F.rms_norm(x + r, w.shape, w, EPS), x + r),
            ),
            f"rotate {kind}": Case((queries, positions), (table,), rotate, formulas.rotate, torchs_rotate),
            f"silu_mul {kind}": Case((gate_up,), (), silu_mul, formulas.silu_mul, torchs_silu_mul),
            f"sum_in_rank_order {kind}": Case(
                (parts,), (), sum_in_rank_order, formulas.sum_in_rank_order, lambda parts: parts.sum(0), dim=1
            ),
        }
    logits = values(logit_rows, vocabulary, seed=8, scale=5, dtype=torch.float32)
    softmax = Case((logits,), (), log_softmax, formulas.log_softmax, lambda x: x.log_softmax(-1), 8)
    return {"log_softmax fp32": softmax} | found | cases_of_experts(dry_run)


def check(report: Report, name: str, case: Case, rounds: int) -> None:
    """Add a line: equal to the formula, one row alone equal to its row in the batch, and GB/s beside torch's."""
    m = case.rows[0].size(case.dim)
    whole = joined(case.ours(*case.rows, *case.fixed))
    first = max(0, m - case.checked)
    on_cpu = [t.cpu() for t in case.part(first, m)]
    fixed = [t.cpu() if isinstance(t, Tensor) else t for t in case.fixed]
    formula = equal_share(whole[first:].cpu(), joined(case.formula(*on_cpu, *fixed)))
    some = (0, 1, m // 2, m - 1)
    alone = [joined(case.ours(*case.part(i, i + 1), *case.fixed)) for i in some]
    rows = equal_share(torch.cat(alone), torch.cat([whole[i : i + 1] for i in some]))
    nbytes = sum(t.nbytes for t in case.rows) + whole.nbytes
    ms = {"ours": milliseconds(lambda: case.ours(*case.rows, *case.fixed), rounds)}
    ms["torch"] = milliseconds(lambda: case.torchs(*case.rows, *case.fixed), rounds)
    speed = {who: nbytes / time / 1e6 for who, time in ms.items()}
    text = f"formula {percent(formula)}; a row alone {percent(rows)}; "
    text += " ".join(f"{who} {time:.3f} ms = {speed[who]:.0f} GB/s" for who, time in ms.items())
    report.add(name, text, formula=formula, row_alone=rows, ms=ms, gb_per_s=speed)
    if formula < 1 or rows < 1:
        report.failures.append(f"operations: {name} does not have its bits")


def check_gradients(report: Report, dry_run: bool, rounds: int) -> None:
    """Add lines about the backward kernels, whose bits are not promised: relative errors to torch's in float32."""
    m, hidden, d = (33, 256, 64) if dry_run else (8192, 4096, 128)
    table, positions = rope_table(m, d, torch.bfloat16), torch.arange(m, device=DEVICE)
    weight = 1 + values(hidden, seed=1, scale=0.1)
    x, residual, gate_up = values(m, hidden, seed=3), values(m, hidden, seed=4), values(m, 2 * hidden, seed=6)
    pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "rms_norm": (
            lambda x, w: rms_norm(x, w, EPS),
            lambda x, w: F.rms_norm(x, w.shape, w, EPS),
            (x, weight),
        ),
        "add_rms_norm": (
            lambda x, r, w: joined(add_rms_norm(x, r, w, EPS)),
            lambda x, r, w: joined((F.rms_norm(x + r, w.shape, w, EPS), x + r)),
            (x, residual, weight),
        ),
        "silu_mul": (silu_mul, torchs_silu_mul, (gate_up,)),
        "rotate": (
            lambda x: rotate(x, positions, table),
            lambda x: torchs_rotate(x, positions, table.to(x.dtype)),
            (x.view(m, -1, d),),
        ),
    }
    for name, (ours, torchs, arguments) in pairs.items():
        with report.guard(f"gradients of {name}"):
            gradients = []
            for function, dtype in ((ours, torch.bfloat16), (torchs, torch.float32)):
                leaves = [a.clone().to(dtype).requires_grad_() for a in arguments]
                out = function(*leaves)
                grad = values(*out.shape, seed=9).to(dtype)
                gradients.append(torch.autograd.grad(out, leaves, grad, retain_graph=True))

                def backward(out: Tensor = out, leaves: Any = leaves, grad: Tensor = grad) -> None:
                    torch.autograd.grad(out, leaves, grad, retain_graph=True)

                if function is ours:
                    ms = milliseconds(backward, rounds)
            errors = [relative_error(got, expected) for got, expected in zip(*gradients, strict=True)]
            text = f"relative errors {', '.join(f'{e:.1e}' for e in errors)}; backward {ms:.3f} ms"
            report.add(f"gradients of {name} bf16", text, relative_errors=errors, ms=ms)


def compare(report: Report, dry_run: bool, rounds: int) -> None:
    """Add the lines of all shared operations."""
    for name, case in cases(dry_run).items():
        if report.has_time():
            with report.guard(name):
                check(report, name, case, rounds)
    with torch.inference_mode(False), torch.enable_grad():
        check_gradients(report, dry_run, rounds)
