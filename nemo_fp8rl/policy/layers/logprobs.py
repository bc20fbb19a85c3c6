"""Log-probabilities of given tokens without the logits of a whole batch: [tokens, vocabulary] exists a chunk at a time.

With a vocabulary of 151,936 the float32 logits of one sequence of 2,048 tokens take 1.2 GB, and softmax and backward
take several times that. Here a chunk's logits are computed, read and dropped, and computed again in the backward.
Beside them the backward holds the head's gradient [V, H] in float32, and at its end a copy in the head's dtype.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_fp8rl.fp8.linear import is_bf16_matmul_fast
from nemo_fp8rl.policy.layers.top_k_top_p import Restriction, restricted

SOFTMAX_ROWS = 16
"""Rows whose softmax is taken at a time, in float32, at least; a GPU takes as many as VALUES have room for."""
VALUES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Float32 values of a temporary, 4 bytes each: few enough for a CPU's cache, enough for a GPU to be worth a kernel."""
INDEX_BYTES = 8
"""Bytes of a value's place, an int64 that sorting gives beside it."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    first_token: int = 0,
    group: dist.ProcessGroup | None = None,
    restriction: Restriction | None = None,
    whole: bool = False,
) -> Tensor:
    """float32 [N]: log softmax(hidden @ weight^T / temperature) at the targets, with gradients.

    hidden: [N, H], in weight's dtype. weight: [V, H]. targets: int64 [N]. Logits have weight's dtype, everything after
    them is float32. chunk_size: tokens whose logits exist at a time.

    group: ranks that share the vocabulary; weight holds the rows from token `first_token` on. Each takes the softmax
    over its own logits and learns how large a share of the whole that is. The gradient of `hidden` is this rank's part
    of a sum over the group.

    whole: each sees all logits of a token and takes their softmax, which is one rank's to the bit. restriction: so does
    it then, over the tokens that top-k and top-p leave.
    """
    if restriction or (whole and group is not None and group.size() > 1):
        return _WholeLogprobs.apply(hidden, weight, targets, temperature, chunk_size, first_token, group, restriction)
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk_size, first_token, group)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        first_token: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        shared = group is not None and group.size() > 1
        targets = targets - first_token
        mine = (targets >= 0) & (targets < len(weight))
        targets = targets.clamp(0, len(weight) - 1)
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        log_share = torch.zeros_like(out)
        for start in range(0, len(hidden), chunk_size):
            logits = hidden[start : start + chunk_size] @ weight.t()
            few = _rows_at_a_time(logits.device, logits.size(1))
            for row in range(0, len(logits), few):
                rows = slice(start + row, start + min(row + few, len(logits)))
                scaled = logits[row : row + few].float() / temperature
                out[rows] = scaled.log_softmax(-1).gather(-1, targets[rows, None]).squeeze(-1)
                if shared:
                    log_share[rows] = scaled.logsumexp(-1)
            del logits  # before the next ones are made
        if shared:
            log_share -= _log_of_sum(log_share, group)
            out = torch.where(mine, out + log_share, 0.0)
            dist.all_reduce(out, group=group)
        ctx.save_for_backward(hidden, weight, targets, mine, log_share.exp())
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, mine, share = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            logits = hidden[part] @ weight.t()
            few = _rows_at_a_time(logits.device, logits.size(1))
            for row in range(0, len(logits), few):
                rows = slice(start + row, start + min(row + few, len(logits)))
                slope = grad[rows, None] / ctx.temperature
                softmax = (logits[row : row + few].float() / ctx.temperature).softmax(-1)
                grad_logits = softmax.mul_(-slope * share[rows, None])
                grad_logits.scatter_add_(-1, targets[rows, None], slope * mine[rows, None])
                logits[row : row + few] = grad_logits  # in the logits' place and dtype
            grad_hidden[part] = _times(logits, weight)
            _add_product(grad_weight, logits, hidden[part])
            del logits
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


class _WholeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        first_token: int,
        group: dist.ProcessGroup | None,
        restriction: Restriction | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.options = temperature, chunk_size, range(first_token, first_token + len(weight)), group, restriction
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        for _, _, rows, logprobs in _whole_rows(hidden, weight, targets, *ctx.options):
            out[rows] = logprobs.gather(-1, targets[rows, None]).squeeze(-1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        temperature, _, own, *_ = ctx.options
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for logits, at, rows, logprobs in _whole_rows(hidden, weight, targets, *ctx.options):
            slope = grad[rows, None] / temperature
            grad_logits = logprobs.exp().mul_(-slope)
            grad_logits.scatter_add_(-1, targets[rows, None], slope)
            logits[at : at + len(slope)] = grad_logits[:, own.start : own.stop]  # in the logits' place and dtype
            if at + len(slope) == len(logits):  # the chunk's last rows
                chunk = slice(rows.stop - len(logits), rows.stop)
                grad_hidden[chunk] = _times(logits, weight)
                _add_product(grad_weight, logits, hidden[chunk])
                del logits  # as `_whole_rows` does
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


def _whole_rows(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    own: range,
    group: dist.ProcessGroup | None,
    restriction: Restriction | None,
) -> Iterator[tuple[Tensor, int, slice, Tensor]]:
    """(a chunk's logits [c, own tokens], first of a few rows in it, these rows of `hidden`, their log-probs [r, V])."""
    shared = group is not None and group.size() > 1
    vocab_size = torch.tensor(own.stop)
    if shared:
        dist.all_reduce(vocab_size, op=dist.ReduceOp.MAX, group=group)
    at_a_time = _rows_at_a_time(hidden.device, int(vocab_size), INDEX_BYTES)
    for start in range(0, len(hidden), chunk_size):
        logits = hidden[start : start + chunk_size] @ weight.t()
        for at in range(0, len(logits), at_a_time):
            few = logits[at : at + at_a_time].float() / temperature
            rows = slice(start + at, start + at + len(few))
            if shared:
                whole = few.new_zeros(len(few), int(vocab_size))
                whole[:, own.start : own.stop] = few
                dist.all_reduce(whole, group=group)  # a sum of one number and zeros
                few = whole
            left = restricted(few, targets[rows], restriction) if restriction else few
            yield logits, at, rows, left.log_softmax(-1)
        del logits  # before the next ones are made; who reads them lets go of them, too


def _rows_at_a_time(device: torch.device, columns: int, nbytes: int = 4) -> int:
    """Rows taken at a time, of so many columns, where the widest temporary has `nbytes` a value."""
    return SOFTMAX_ROWS if device.type == "cpu" else max(SOFTMAX_ROWS, 4 * VALUES["cuda"] // (nbytes * columns))


def _log_of_sum(logs: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """log of the sum over the group of exp(logs), elementwise; the same bits on every rank."""
    assert group is not None
    gathered = [torch.empty_like(logs) for _ in range(group.size())]
    dist.all_gather(gathered, logs, group=group)
    return torch.stack(gathered).logsumexp(0)


def _times(logits: Tensor, weight: Tensor) -> Tensor:
    """logits [c, V] @ weight [V, H]. Where it is made in float32, in slices: no second [V, H] is needed."""
    dtype = _multiplied_in(logits.dtype)
    if dtype is logits.dtype:
        return logits @ weight
    total, step = logits.new_zeros(len(logits), weight.size(1), dtype=dtype), _rows_of_a_slice(weight)
    for start in range(0, len(weight), step):
        total.addmm_(logits[:, start : start + step].to(dtype), weight[start : start + step].to(dtype))
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] += left^T @ right, each product rounded to bfloat16 unless it is made in float32, a slice of rows
    at a time so that no second [V, H] is needed.
    """
    step, right = _rows_of_a_slice(total), right.to(_multiplied_in(right.dtype))
    for start in range(0, len(total), step):
        total[start : start + step] += left[:, start : start + step].t().to(right.dtype) @ right


def _multiplied_in(dtype: torch.dtype) -> torch.dtype:
    """float32 where bfloat16 matmuls are slow. Gradients alone: the logits are to be the engine's."""
    return torch.float32 if dtype is torch.bfloat16 and not is_bf16_matmul_fast() else dtype


def _rows_of_a_slice(weight: Tensor) -> int:
    return max(1, VALUES[weight.device.type] // weight.size(1))
