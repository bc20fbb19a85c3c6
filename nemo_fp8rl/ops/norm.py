"""RMSNorm, with and without the addition of a residual.

    scale = 1 / sqrt(fma(sum of x^2, 1 / H, eps))      float32; the sum is `elementary.tree_sum`
    y     = (x * scale) * weight                       float32, with one rounding to x's dtype

With a residual, x is the sum x + residual ROUNDED to its dtype, which is also what the next layer adds to. These are
the roundings of torch's rms_norm, of Transformer Engine and of vLLM's kernel in C; vLLM's compiled and native norms
round otherwise (vllm ir/ops/layernorm.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.ops.elementary import tree_sum

TILE_VALUES = 1 << 12
"""Values of a program's tile: short rows are taken together. It changes no bit."""
BACKWARD_PROGRAMS = 256
"""Most partial sums of a weight's gradient."""


@triton.jit
def _norm_tile(x, size, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (x * scale, scale [ROWS]) of float32 x [ROWS, BLOCK], which is zero from column `size` on."""
    total = tree_sum(x * x, ROWS, BLOCK)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.fma(total, tl.div_rn(1.0, size.to(tl.float32)), eps)))
    return x * scale[:, None], scale


@triton.jit
def norm_kernel(
    x, residual, weight, out, total, rows, size, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS rows of x [rows, size]."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    at = row * size + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value = value + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    normalized, _ = _norm_tile(value, size, eps, ROWS, BLOCK)
    w = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + at, (normalized * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    x, weight, grad, grad_x, grad_weight, rows, size, eps, steps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x for `steps` tiles of ROWS rows, and one row [size] of partial sums of weight's."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(steps):
        row = ((program * steps + step) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < size)
        at = row * size + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normalized, scale = _norm_tile(value, size, eps, ROWS, BLOCK)
        partial += dy * normalized
        dot = tl.sum(dy * w * normalized, 1) / size
        dx = (dy * w - normalized * dot[:, None]) * scale[:, None]
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * size + column, tl.sum(partial, 0)[None, :], mask=column < size)


@torch.library.custom_op("nemo_fp8rl::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x over its last dimension, in x's dtype.

    x:       [..., H], bf16 or fp32
    weight:  [H]
    """
    rows, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, out, None, eps)
    return out


@torch.library.custom_op("nemo_fp8rl::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm of total, total) with total = x + residual, both in x's dtype.

    x, residual:  [..., H], of one dtype
    weight:       [H]
    """
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x.contiguous(), residual.contiguous(), weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    size = x.size(-1)
    rows, (tile, block) = x.numel() // size, _tile(size)
    if rows:
        norm_kernel[(triton.cdiv(rows, tile),)](
            x, residual, weight, out, total, rows, size, eps,
            HAS_RESIDUAL=residual is not None, ROWS=tile, BLOCK=block, enable_fp_fusion=False,
        )  # fmt: skip


def _tile(size: int) -> tuple[int, int]:
    """Return (rows, columns) of a program's tile."""
    block = triton.next_power_of_2(size)
    return max(1, TILE_VALUES // block), block


@torch.library.custom_op("nemo_fp8rl::rms_norm_backward", mutates_args=())
def rms_norm_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of `rms_norm`: of x, in its dtype, and of weight, in its dtype, summed in float32."""
    size = x.size(-1)
    x, grad, rows = x.contiguous(), grad.contiguous(), x.numel() // size
    tile, block = _tile(size)
    tiles = triton.cdiv(rows, tile)
    steps = max(1, triton.cdiv(tiles, BACKWARD_PROGRAMS))
    programs = triton.cdiv(tiles, steps)
    grad_x, partial = torch.empty_like(x), torch.zeros(max(1, programs), size, dtype=torch.float32, device=x.device)
    if rows:
        norm_backward_kernel[(programs,)](
            x, weight, grad, grad_x, partial, rows, size, eps, steps, ROWS=tile, BLOCK=block
        )
    return grad_x, partial.sum(0).to(weight.dtype)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))  # type: ignore[return-value]


@rms_norm_backward.register_fake
def _(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _keep_norm_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _norm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(*ctx.saved_tensors, grad, ctx.eps), None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.eps = inputs[3]
    ctx.save_for_backward(output[1], inputs[2])


def _add_norm_gradients(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    grad_x, grad_weight = rms_norm_backward(*ctx.saved_tensors, grad, ctx.eps)
    grad_x = grad_x + grad_total
    return grad_x, grad_x.clone(), grad_weight, None


rms_norm.register_autograd(_norm_gradients, setup_context=_keep_norm_inputs)
add_rms_norm.register_autograd(_add_norm_gradients, setup_context=_keep_sum)
