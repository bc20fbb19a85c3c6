"""Log-probabilities of target tokens without the logits of a whole batch: only one chunk of logits exists at a time.

With a vocabulary of 151,936 the float32 logits of one sequence of 2,048 tokens take 1.2 GB, and softmax and backward
take several times that. This module computes, reads and drops a chunk's logits, and computes them again in the
backward. The backward also holds the head's gradient [V, H] in float32, and at its end a copy in the head's dtype.

Top-k and top-p select tokens as vLLM's sampler does on a CPU. On a GPU vLLM 0.32 selects exactly k tokens
(vllm/v1/sample/ops/topk_topp_triton.py): it drops some of the tokens that tie with the k-th, and this module keeps all
of them. Its kernel decides which, so the trainer cannot follow; the trainer's log-probs are then lower, by the share of
the ties that the engine dropped.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_fp8rl.fp8.linear import is_matmul_fast
from nemo_fp8rl.ops.alignment import Alignment
from nemo_fp8rl.policy.sharpness import SUMS, combine, sharpness, sum_columns

SOFTMAX_ROWS = 16
"""The least number of rows of one float32 softmax; a GPU takes as many rows as fit into VALUES."""
VALUES = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Float32 values of a temporary, 4 bytes each: few enough for a CPU's cache, enough to occupy a GPU's kernel."""
INDEX_BYTES = 8
"""Bytes of the int64 index that sorting returns with each value."""


class TokenFilter(NamedTuple):
    """The sampling limits of an engine; False if they select all tokens.

    top_k:  None for all tokens
    top_p:  1 for all tokens
    """

    top_k: int | None
    top_p: float

    def __bool__(self) -> bool:
        return self.top_k is not None or self.top_p < 1


class Head(NamedTuple):
    """What computes log-probs of hidden states.

    product:      (hidden [n, H], weight [V, H]) -> logits [n, V]
    log_softmax:  float32 [n, V] -> float32 [n, V]
    """

    product: Callable[[Tensor, Tensor], Tensor]
    log_softmax: Callable[[Tensor], Tensor]


TORCH_HEAD = Head(F.linear, partial(torch.log_softmax, dim=-1))


def choose_head(alignment: Alignment) -> Head:
    """Return the functions of the head that round as this alignment says."""
    if alignment != "shared_ops":
        return TORCH_HEAD
    from nemo_fp8rl.ops.log_softmax import log_softmax
    from nemo_fp8rl.ops.matmul import linear

    return Head(linear, log_softmax)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    first_token: int = 0,
    group: dist.ProcessGroup | None = None,
    token_filter: TokenFilter | None = None,
    whole: bool = False,
    head: Head = TORCH_HEAD,
    measurement: "Measurement | None" = None,
) -> Tensor:
    """Return log softmax(hidden @ weight^T / temperature) at the targets, float32 [N], with gradients.

    Logits have weight's dtype; everything after them is float32. Ranks that share the vocabulary take the softmax over
    their own logits and exchange the share that each has of the whole. The gradient of `hidden` is then this rank's
    part of a sum over the group.

    hidden:        [N, H], in weight's dtype
    weight:        [V, H], the head, or this rank's rows of it
    targets:       int64 [N], token ids
    chunk_size:    number of tokens whose logits exist at a time
    first_token:   token id of weight's first row
    group:         ranks that share the vocabulary; None for one rank
    token_filter:  take the softmax only over the tokens that top-k and top-p select; implies `whole`
    whole:         every rank gathers all logits of a token, so that its softmax equals that of one rank to the bit
    head:          the functions of the head; the engine's, where the two must agree to the bit
    measurement:   receives the sharpness of each token; None measures nothing
    """
    options = _Options(temperature, chunk_size, first_token, group, token_filter, head, measurement)
    if token_filter or (whole and group is not None and group.size() > 1):
        return _WholeLogprobs.apply(hidden, weight, targets, options)
    return _TokenLogprobs.apply(hidden, weight, targets, options)


class Measurement(NamedTuple):
    """A measurement of sharpness at the logits of the softmax, so after temperature, top-k and top-p.

    epsilon:  see `sharpness`
    values:   float32 [N], written by the forward pass
    """

    epsilon: float
    values: Tensor


class _Options(NamedTuple):
    """The arguments of `token_logprobs` without a gradient."""

    temperature: float
    chunk_size: int
    first_token: int
    group: dist.ProcessGroup | None
    token_filter: TokenFilter | None
    head: Head
    measurement: Measurement | None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: _Options) -> Tensor:
        temperature, chunk_size, first_token, group, _, head, measurement = options
        is_shared = group is not None and group.size() > 1
        ids, targets = targets, targets - first_token
        is_local = (targets >= 0) & (targets < len(weight))
        targets = targets.clamp(0, len(weight) - 1)
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        log_share = torch.zeros_like(out)
        sums = out.new_empty(SUMS, 0 if measurement is None else len(out))
        for start in range(0, len(hidden), chunk_size):
            logits = head.product(hidden[start : start + chunk_size], weight)
            step = _rows_at_a_time(logits.device, logits.size(1))
            for row in range(0, len(logits), step):
                rows = slice(start + row, start + min(row + step, len(logits)))
                scaled = logits[row : row + step].float() / temperature
                out[rows] = head.log_softmax(scaled).gather(-1, targets[rows, None]).squeeze(-1)
                if is_shared:
                    log_share[rows] = scaled.logsumexp(-1)
                if measurement is not None:
                    sums[:, rows] = sum_columns(scaled, ids[rows], measurement.epsilon, first_token)
            del logits  # before the next chunk's logits are made
        if measurement is not None:
            measurement.values.copy_(combine(sums, measurement.epsilon, group))
        if is_shared:
            log_share -= _log_sum_exp(log_share, group)
            out = torch.where(is_local, out + log_share, 0.0)
            dist.all_reduce(out, group=group)
        ctx.save_for_backward(hidden, weight, targets, is_local, log_share.exp())
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, is_local, share = ctx.saved_tensors
        temperature, chunk_size, *_, head, _ = ctx.options
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = head.product(hidden[chunk], weight)
            step = _rows_at_a_time(logits.device, logits.size(1))
            for row in range(0, len(logits), step):
                rows = slice(start + row, start + min(row + step, len(logits)))
                slope = grad[rows, None] / temperature
                softmax = (logits[row : row + step].float() / temperature).softmax(-1)
                grad_logits = softmax.mul_(-slope * share[rows, None])
                grad_logits.scatter_add_(-1, targets[rows, None], slope * is_local[rows, None])
                logits[row : row + step] = grad_logits  # in the logits' memory and dtype
            grad_hidden[chunk] = _multiply(logits, weight)
            _add_product(grad_weight, logits, hidden[chunk])
            del logits
        return grad_hidden, grad_weight.to(weight.dtype), None, None


class _WholeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: _Options) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.options = options
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        for _, _, rows, logprobs in _whole_rows(hidden, weight, targets, options):
            out[rows] = logprobs.gather(-1, targets[rows, None]).squeeze(-1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        temperature, first_token = ctx.options.temperature, ctx.options.first_token
        local = slice(first_token, first_token + len(weight))
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for logits, at, rows, logprobs in _whole_rows(hidden, weight, targets, ctx.options):
            slope = grad[rows, None] / temperature
            grad_logits = logprobs.exp().mul_(-slope)
            grad_logits.scatter_add_(-1, targets[rows, None], slope)
            logits[at : at + len(slope)] = grad_logits[:, local]  # in the logits' memory and dtype
            if at + len(slope) == len(logits):  # these are the chunk's last rows
                chunk = slice(rows.stop - len(logits), rows.stop)
                grad_hidden[chunk] = _multiply(logits, weight)
                _add_product(grad_weight, logits, hidden[chunk])
                del logits  # `_whole_rows` deletes its reference, too
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _whole_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: _Options
) -> Iterator[tuple[Tensor, int, slice, Tensor]]:
    """Yield a few rows at a time, with their log-probs over the whole vocabulary.

    Yields: a chunk's logits [c, this rank's tokens], the first of the rows in it, the rows in `hidden`, and their
    log-probs [r, V].
    """
    temperature, chunk_size, first_token, group, token_filter, head, measurement = options
    local = slice(first_token, first_token + len(weight))
    is_shared = group is not None and group.size() > 1
    vocab_size = torch.tensor(local.stop)
    if is_shared:
        dist.all_reduce(vocab_size, op=dist.ReduceOp.MAX, group=group)
    step = _rows_at_a_time(hidden.device, int(vocab_size), INDEX_BYTES)
    for start in range(0, len(hidden), chunk_size):
        logits = head.product(hidden[start : start + chunk_size], weight)
        for at in range(0, len(logits), step):
            scaled = logits[at : at + step].float() / temperature
            rows = slice(start + at, start + at + len(scaled))
            if is_shared:
                whole = scaled.new_zeros(len(scaled), int(vocab_size))
                whole[:, local] = scaled
                dist.all_reduce(whole, group=group)  # exact, because it sums one number and zeros
                scaled = whole
            if token_filter:
                scaled = filter_logits(scaled, targets[rows], token_filter)
            if measurement is not None:  # every rank has the whole vocabulary
                measurement.values[rows] = sharpness(scaled, targets[rows], measurement.epsilon)
            yield logits, at, rows, head.log_softmax(scaled)
        del logits  # before the next chunk's logits are made; the caller deletes its reference, too


def _rows_at_a_time(device: torch.device, columns: int, nbytes: int = 4) -> int:
    """Return the number of rows of one softmax.

    nbytes:  bytes per value of the widest temporary
    """
    return SOFTMAX_ROWS if device.type == "cpu" else max(SOFTMAX_ROWS, 4 * VALUES["cuda"] // (nbytes * columns))


def _log_sum_exp(logs: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return log of the sum over the group of exp(logs), elementwise; all ranks get the same bits."""
    assert group is not None
    parts = [torch.empty_like(logs) for _ in range(group.size())]
    dist.all_gather(parts, logs, group=group)
    return torch.stack(parts).logsumexp(0)


def _multiply(logits: Tensor, weight: Tensor) -> Tensor:
    """Return logits [c, V] @ weight [V, H]; a product in float32 runs in slices, to need no second [V, H]."""
    dtype = _product_dtype(logits.dtype)
    if dtype is logits.dtype:
        return logits @ weight
    total, step = logits.new_zeros(len(logits), weight.size(1), dtype=dtype), _rows_per_slice(weight)
    for start in range(0, len(weight), step):
        total.addmm_(logits[:, start : start + step].to(dtype), weight[start : start + step].to(dtype))
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T @ right to total [V, H], one slice of rows at a time, to need no second [V, H].

    Each product is rounded to `right`'s dtype, unless it is computed in float32.
    """
    step, right = _rows_per_slice(total), right.to(_product_dtype(right.dtype))
    for start in range(0, len(total), step):
        total[start : start + step] += left[:, start : start + step].t().to(right.dtype) @ right


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gradients' products: float32 where matmuls in `dtype` are slow.

    It does not apply to logits, which must equal the engine's.
    """
    return dtype if is_matmul_fast(dtype) else torch.float32


def _rows_per_slice(weight: Tensor) -> int:
    return max(1, VALUES[weight.device.type] // weight.size(1))


def filter_logits(logits: Tensor, targets: Tensor, token_filter: TokenFilter) -> Tensor:
    """Return the logits, float32 [N, V], with -inf at tokens that cannot be sampled, except at `targets`, int64 [N].

    Top-k is first and keeps ties of the k-th. Top-p follows, on the softmax of the remaining tokens: it drops tokens
    from the least likely on, as long as their probabilities add up to at most 1 - p
    (vllm/v1/sample/ops/topk_topp_sampler.py). A target was sampled, so it was in the engine's set; where rounding puts
    it just outside the trainer's set, its probability must not become 0.
    """
    ordered, order = logits.sort(-1)
    if token_filter.top_k is not None and token_filter.top_k < logits.size(-1):
        ordered = ordered.masked_fill(ordered < ordered[:, -token_filter.top_k, None], -torch.inf)
    if token_filter.top_p < 1:
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - token_filter.top_p
        outside[:, -1] = False
        ordered = ordered.masked_fill(outside, -torch.inf)
    selected = torch.empty_like(logits).scatter_(-1, order, ordered)
    return selected.scatter_(-1, targets[:, None], logits.gather(-1, targets[:, None]))
