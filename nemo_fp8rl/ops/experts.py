"""Mixture of experts: the choice of experts, their products, and the sum over a token's experts.

    choose_experts   p = exp(logit - max) / sum (`tree_sum`); the k largest logits, of equal ones the lower index first;
                     renormalized: p / (p of the first + p of the second + ...)
    experts_linear   a row's product with its expert is that of `matmul.fp8_linear` or `matmul.linear`, to the bit
    combine          y = fma(weight, expert's output, y) in the order of the experts' numbers, one rounding

No row depends on the other rows: neither on how many rows an expert has, nor on their order. There are no gradients.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.fp8 import quantize_activations
from nemo_fp8rl.ops.elementary import exp, tree_sum
from nemo_fp8rl.ops.matmul import BLOCK_K, BLOCK_M, BLOCK_N, FP8_BLOCK

ROUTER_ROWS, COMBINE_COLUMNS = 4, 1024
"""Sizes of a program's tile. They change no bit."""


@triton.jit
def choose_experts_kernel(
    logits, weights, ids, rows, experts,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write K weights and numbers of experts for ROWS rows of logits [rows, experts]."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    is_row = row < rows
    inside = is_row[:, None] & (column < experts)
    x = tl.load(logits + row[:, None] * experts + column, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(is_row[:, None], x, 0.0)
    largest = tl.max(x, 1)
    total = tree_sum(exp(x - largest[:, None]), ROWS, BLOCK)
    chosen = tl.zeros([ROWS], tl.float32)
    parts = ()
    for slot in tl.static_range(K):
        best = tl.max(x, 1)
        index = tl.min(tl.where(x == best[:, None], column, BLOCK), 1)
        parts += (tl.div_rn(exp(best - largest), total),)  # type: ignore[assignment]
        chosen += parts[slot]
        tl.store(ids + row * K + slot, index, mask=is_row)
        x = tl.where(column == index[:, None], float("-inf"), x)
    for slot in tl.static_range(K):
        weight = tl.div_rn(parts[slot], chosen) if RENORMALIZE else parts[slot]
        tl.store(weights + row * K + slot, weight, mask=is_row)


@torch.library.custom_op("nemo_fp8rl::choose_experts", mutates_args=())
def choose_experts(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return (weights, float32 [tokens, k]; experts, int32 [tokens, k]), the largest weight first.

    logits:  [tokens, experts]
    """
    logits, (rows, experts) = logits.contiguous(), logits.shape
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows:
        choose_experts_kernel[(triton.cdiv(rows, ROUTER_ROWS),)](
            logits, weights, ids, rows, experts,
            K=k, RENORMALIZE=renormalize, ROWS=ROUTER_ROWS, BLOCK=triton.next_power_of_2(experts),
        )  # fmt: skip
    return weights, ids


@choose_experts.register_fake
def _(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shape = logits.size(0), k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


class Tiles(NamedTuple):
    """Slots (a token's row with one of its experts, numbered token by token) by expert, in tiles of BLOCK_M.

    order:    int32 [tiles * BLOCK_M], slots; the number of slots where a tile is not full
    experts:  int32 [tiles], the expert of each tile in `weight`; -1 for an unused tile, and for another rank's expert
    """

    order: Tensor
    experts: Tensor


def tiles_of_experts(ids: Tensor, experts: int, expert_map: Tensor | None = None) -> Tiles:
    """Sort slots into tiles. The shapes follow from those of the arguments, so that a CUDA graph can hold it.

    ids:         integers [tokens, k], numbers of experts
    experts:     how many experts there are
    expert_map:  int [experts], each expert's number on this rank, or -1; None where this rank has all
    """
    flat = ids.reshape(-1).long()
    slots = flat.numel()
    tiles = slots // BLOCK_M + min(experts, slots)  # each expert fills its last tile up
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + BLOCK_M - 1) // BLOCK_M).cumsum(0)  # in tiles
    starts = ends - (counts + BLOCK_M - 1) // BLOCK_M
    by_expert = flat.argsort(stable=True)
    expert = flat[by_expert]
    within = torch.arange(slots, device=ids.device) - (counts.cumsum(0) - counts)[expert]
    order = torch.full((tiles * BLOCK_M,), slots, dtype=torch.int32, device=ids.device)
    order[starts[expert] * BLOCK_M + within] = by_expert.int()
    number = torch.searchsorted(ends, torch.arange(tiles, device=ids.device), right=True)
    local = torch.arange(experts, device=ids.device) if expert_map is None else expert_map.long()
    of_tile = torch.where(number < experts, local[number.clamp(max=experts - 1)], -1)
    return Tiles(order, of_tile.int())


@triton.jit
def experts_kernel(
    x, weight, x_scale, weight_scale, out, order, tile_experts, slots, top_k, n, k, stride_scale_m, stride_scale_k,
    IS_FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write one tile of out [slots, n] = x [slots // top_k, k] @ weight[expert] [n, k]^T.

    The sums are those of `fp8_linear_kernel` and `linear_kernel` in matmul.py.
    """
    columns = tl.cdiv(n, BLOCK_N)
    tile, first_column = tl.program_id(0) // columns, (tl.program_id(0) % columns).to(tl.int64) * BLOCK_N
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert >= 0:
        slot = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        row, column, is_slot = slot // top_k, first_column + tl.arange(0, BLOCK_N), slot < slots
        weight += expert * n * k
        blocks = tl.cdiv(k, BLOCK_K)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block in range(blocks):
            i = block * BLOCK_K + tl.arange(0, BLOCK_K)
            a = tl.load(x + row[:, None] * k + i[None, :], mask=is_slot[:, None] & (i[None, :] < k), other=0.0)
            at = weight + column[None, :] * k + i[:, None]
            b = tl.load(at, mask=(column[None, :] < n) & (i[:, None] < k), other=0.0)
            if IS_FP8:
                s = tl.load(x_scale + row * stride_scale_m + block * stride_scale_k, mask=is_slot, other=0.0)
                of_expert = weight_scale + expert * tl.cdiv(n, BLOCK_K) * blocks
                scale = s * tl.load(of_expert + first_column // BLOCK_K * blocks + block)
                total = tl.fma(tl.dot(a, b), tl.broadcast_to(scale[:, None], (BLOCK_M, BLOCK_N)), total)
            else:
                total = tl.dot(a, b, total)
        inside = is_slot[:, None] & (column[None, :] < n)
        tl.store(out + slot[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)


def experts_linear(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor | None, tiles: Tiles, top_k: int, pow2: bool
) -> Tensor:
    """Multiply the row of each slot by its expert; return [rows * top_k, N] in x's dtype. Other ranks' slots are zero.

    x:                 [rows, K], bf16; slot s has row s // top_k
    weight:            [E, N, K], E4M3 or x's dtype
    weight_scale_inv:  float32 [E, ceil(N/128), ceil(K/128)] of E4M3, else None
    top_k:             slots of a row: k for the first product, 1 for the second, whose rows are slots
    pow2:              the scales of x are powers of two
    """
    n, k = weight.shape[1:]
    out = x.new_zeros((x.size(0) * top_k, n))
    data, scale, strides = x.contiguous(), None, (0, 0)
    if weight_scale_inv is not None:
        quantized = quantize_activations(x, "pow2" if pow2 else "fp32")
        data, scale = quantized.data, quantized.scale_inv
        strides = scale.stride(0), scale.stride(1)
    if len(out):
        experts_kernel[(len(tiles.experts) * triton.cdiv(n, BLOCK_N),)](
            data, weight, scale, weight_scale_inv, out, tiles.order, tiles.experts, len(out), top_k, n, k, *strides,
            IS_FP8=scale is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K if scale is None else FP8_BLOCK,
        )  # fmt: skip
    return out


@triton.jit
def combine_kernel(y, weights, order, out, n, k, BLOCK: tl.constexpr):
    """Write BLOCK columns of one row of out [tokens, n]."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(k):
        slot = token * k + tl.load(order + token * k + i)
        value = tl.load(y + slot * n + column, mask=column < n, other=0.0).to(tl.float32)
        weight = tl.load(weights + slot) + tl.zeros([BLOCK], tl.float32)
        total = tl.fma(weight, value, total)
    tl.store(out + token * n + column, total.to(out.dtype.element_ty), mask=column < n)


@torch.library.custom_op("nemo_fp8rl::combine", mutates_args=())
def combine(y: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return the weighted sum over each token's experts, [tokens, N], in y's dtype.

    y:        [tokens * k, N], outputs of the experts by slot
    weights:  float32 [tokens, k]
    ids:      integers [tokens, k]
    """
    (tokens, k), n = weights.shape, y.size(1)
    out = y.new_empty((tokens, n))
    if tokens:
        combine_kernel[(tokens, triton.cdiv(n, COMBINE_COLUMNS))](
            y.contiguous(), weights.contiguous(), ids.argsort(-1), out, n, k, BLOCK=COMBINE_COLUMNS
        )
    return out


@combine.register_fake
def _(y: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return y.new_empty((weights.size(0), y.size(1)))
