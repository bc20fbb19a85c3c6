"""Attention of the libraries and of ours: does a row depend on how it was asked for? And the gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.report import DEVICE, MISSING, ON_GPU, Report, equal_share, milliseconds, percent, relative_error
from nemo_fp8rl.ops.attention import attention

GROUPS, PER_GROUP = 8, 4
LENGTHS, CHUNK, POSITIONS, OTHERS, PAGE = (2000, 1333, 640, 77), 512, 20, 63, 16
DRY_LENGTHS, DRY_CHUNK, DRY_POSITIONS, DRY_OTHERS = (70, 33), 32, 2, 2


@dataclass
class Batch:
    """Queries at the ends of sequences, with all keys before them.

    q:             [tokens, heads, d]
    keys, values:  of each sequence, [length, groups, d]
    counts:        queries of each sequence
    """

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    counts: list[int]

    def __post_init__(self) -> None:
        self.lengths = [len(k) for k in self.keys]
        self.query_starts = starts_of(self.counts)
        self.scale = self.q.size(-1) ** -0.5


Attend = Callable[[], tuple[Tensor, Tensor]]
"""() -> (out [tokens, heads, d], log-sum-exp [heads, tokens])."""
Kernel = Callable[[Batch, int], Attend]
"""(batch, page size, or 0 for keys without pages) -> the call, whose arguments are in place."""


def integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts_of(counts: Sequence[int]) -> Tensor:
    return F.pad(integers(counts).cumsum(0, dtype=torch.int32), (1, 0))


def paged(keys: list[Tensor], page_size: int) -> tuple[Tensor, Tensor]:
    """Return (pages [pages, page_size, groups, d] in a random order, block table)."""
    counts = [-(-len(k) // page_size) for k in keys]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).split(counts)
    pages = keys[0].new_zeros(sum(counts), page_size, *keys[0].shape[1:])
    table = torch.zeros(len(keys), max(counts), dtype=torch.int32)
    for row, own, k in zip(table, order, keys, strict=True):
        row[: len(own)] = own
        filled = F.pad(k, (0, 0, 0, 0, 0, -len(k) % page_size))
        pages[own.to(k.device)] = filled.view(len(own), page_size, *k.shape[1:])
    return pages, table.to(DEVICE)


def by_flash_attention_3(splits: int) -> Kernel:
    """Return FlashAttention 3 as vLLM builds it. Raises ImportError, also where this GPU cannot run it.

    splits:  1, or 0 for the library's choice by batch
    """
    if not ON_GPU:
        raise ImportError("needs a GPU")
    from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

    if not is_fa_version_supported(3):
        raise ImportError("FlashAttention 3 does not support this GPU")

    def prepare(batch: Batch, page_size: int) -> Attend:
        if page_size:
            (k, table), (v, _) = paged(batch.keys, page_size), paged(batch.values, page_size)
            keys = {"seqused_k": integers(batch.lengths), "block_table": table}
        else:
            k, v = torch.cat(batch.keys), torch.cat(batch.values)
            keys = {"cu_seqlens_k": starts_of(batch.lengths)}
        options = {"softmax_scale": batch.scale, "causal": True, "return_softmax_lse": True, "fa_version": 3}
        return lambda: flash_attn_varlen_func(
            q=batch.q,
            k=k,
            v=v,
            max_seqlen_q=max(batch.counts),
            cu_seqlens_q=batch.query_starts,
            max_seqlen_k=max(batch.lengths),
            num_splits=splits,
            **options,
            **keys,
        )[:2]

    return prepare


def by_ours(batch: Batch, page_size: int) -> Attend:
    (k, table), (v, _) = paged(batch.keys, page_size or 1), paged(batch.values, page_size or 1)
    lengths = integers(batch.lengths)
    return lambda: attention(batch.q, k, v, table, batch.query_starts, lengths, batch.scale)


KERNELS: dict[str, Callable[[], Kernel]] = {
    "FA3, 1 split": lambda: by_flash_attention_3(1),
    "FA3, its choice": lambda: by_flash_attention_3(0),
    "ours": lambda: by_ours,
}


class Sequences:
    """Random sequences of which any part can be asked for."""

    def __init__(self, lengths: Sequence[int], d: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(d)

        def values(length: int, heads: int) -> Tensor:
            return torch.randn(length, heads, d, generator=generator, device=DEVICE).bfloat16()

        self.lengths = lengths
        self.parts = [(values(n, GROUPS * PER_GROUP), values(n, GROUPS), values(n, GROUPS)) for n in lengths]

    def ask(self, which: Sequence[int], ends: Sequence[int], counts: Sequence[int]) -> Batch:
        """Return the last `counts` queries before `ends` of these sequences."""
        rows = zip(which, ends, counts, strict=True)
        q = torch.cat([self.parts[i][0][end - n : end] for i, end, n in rows])
        keys, values = ([self.parts[i][at][:end] for i, end in zip(which, ends, strict=True)] for at in (1, 2))
        return Batch(q, keys, values, [*counts])


def compare_rows(report: Report, name: str, kernel: Kernel, sequences: Sequences, dry_run: bool, rounds: int) -> None:
    """Add a line: the share of bits that are those of all sequences read at once without pages, for each way to ask."""
    lengths = sequences.lengths
    every, first = range(len(lengths)), lengths[0]
    chunk, positions, others = (DRY_CHUNK, DRY_POSITIONS, DRY_OTHERS) if dry_run else (CHUNK, POSITIONS, OTHERS)
    all_at_once = sequences.ask(every, lengths, lengths)
    whole, whole_lse = kernel(all_at_once, 0)()

    def share(batch: Batch, page_size: int, start: int, count: int) -> float:
        """Of the first `count` queries of a batch, which are those from `start` on of the first sequence."""
        out, lse = kernel(batch, page_size)()
        expected, expected_lse = whole[start : start + count], whole_lse[:, start : start + count]
        return (equal_share(out[:count], expected) + equal_share(lse[:, :count], expected_lse)) / 2

    ends = [(i + 1) * first // positions for i in range(positions)]
    starts = range(0, first, chunk)
    companions = [(1 + i % (len(lengths) - 1), 1 + 37 * i % min(lengths)) for i in range(others)]
    which, other_ends = [[*part] for part in zip(*companions, strict=True)]

    def mean(shares: list[float]) -> float:
        return sum(shares) / len(shares)

    shares = {
        "alone": share(sequences.ask([0], [first], [first]), 0, 0, first),
        "pages": share(all_at_once, PAGE, 0, sum(lengths)),
        "chunks": mean(
            [
                share(
                    sequences.ask([0], [min(s + chunk, first)], [min(chunk, first - s)]), PAGE, s, min(chunk, first - s)
                )
                for s in starts
            ]
        ),
        "decode alone": mean([share(sequences.ask([0], [end], [1]), PAGE, end - 1, 1) for end in ends]),
        f"decode beside {others}": mean(
            [
                share(sequences.ask([0, *which], [end, *other_ends], [1] * (others + 1)), PAGE, end - 1, 1)
                for end in ends
            ]
        ),
        "decode beside a prompt": mean(
            [share(sequences.ask([0, 1], [end, lengths[1]], [1, lengths[1]]), PAGE, end - 1, 1) for end in ends[:3]]
        ),
    }
    ms = milliseconds(kernel(all_at_once, 0), rounds)
    moved = [f"{way} {percent(s)}" for way, s in shares.items() if s < 1]
    text = f"{'all ways equal' if not moved else 'equal: ' + ', '.join(moved)}; {ms:.3f} ms"
    report.add(name, text, equal=shares, ms=ms)
    if name.startswith("ours") and moved:
        report.failures.append(f"attention: {name}: {', '.join(moved)}")


def compare_gradients(report: Report, name: str, kernel: Kernel, d: int, length: int, rounds: int) -> None:
    """Add a line: gradients by torch's FlashAttention 2 from this kernel's output and log-sum-exp, against SDPA's."""
    sequences = Sequences((length,), d)
    batch = sequences.ask([0], [length], [length])
    (k,), (v,) = batch.keys, batch.values
    out, lse = kernel(batch, 0)()
    grad = torch.randn(out.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).bfloat16()
    leaves = [t.clone().requires_grad_() for t in (batch.q, k, v)]

    def sdpa() -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in leaves)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    expected_out = sdpa()
    expected = torch.autograd.grad(expected_out, leaves, grad, retain_graph=True)
    ms = {
        "SDPA forward": milliseconds(sdpa, rounds),
        "SDPA backward": milliseconds(
            lambda: torch.autograd.grad(expected_out, leaves, grad, retain_graph=True), rounds
        ),
    }
    out_error = relative_error(out, expected_out)
    if not ON_GPU:
        report.add(f"{name}, gradients", f"output {out_error:.1e} from SDPA's; the backward needs a GPU", missing=True)
        return
    starts, state = starts_of([length]), torch.zeros(2, dtype=torch.uint64, device=DEVICE)

    def backward() -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_backward(
            grad, batch.q, k, v, out, lse, starts, starts, length, length, 0.0, True, state, state[:1],
            scale=batch.scale,
        )  # fmt: skip

    errors = [relative_error(got, wanted) for got, wanted in zip(backward(), expected, strict=True)]
    ms["backward"] = milliseconds(backward, rounds)
    text = f"output {out_error:.1e} from SDPA's; dq, dk, dv {', '.join(f'{e:.1e}' for e in errors)}; ms: "
    report.add(
        f"{name}, gradients",
        text + " ".join(f"{who} {time:.3f}" for who, time in ms.items()),
        output_error=out_error,
        gradient_errors=errors,
        ms=ms,
    )


def compare(report: Report, dry_run: bool, rounds: int) -> None:
    """Add the lines of attention: heads of 128 first."""
    kernels: dict[str, Kernel] = {}
    for name, make in KERNELS.items():
        try:
            kernels[name] = make()
        except MISSING as error:
            report.leave_out(name, error)
    for d in (64,) if dry_run else (128, 64):
        for name, kernel in kernels.items():
            case = f"{name}, heads of {d}"
            if report.has_time():
                with report.guard(case), torch.no_grad():
                    compare_rows(
                        report, case, kernel, Sequences(DRY_LENGTHS if dry_run else LENGTHS, d), dry_run, rounds
                    )
        for name, kernel in kernels.items():
            case = f"{name}, heads of {d}"
            if "choice" not in name and report.has_time():
                with report.guard(f"{case}, gradients"):
                    compare_gradients(report, case, kernel, d, max(DRY_LENGTHS if dry_run else LENGTHS), rounds)
