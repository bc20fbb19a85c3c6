"""Rotary position embedding of halves (neox style).

    out1 = fma(-x2, sin, x1 * cos)      float32, with one rounding to x's dtype
    out2 = fma( x1, sin, x2 * cos)

The table has x's dtype. In bfloat16 the products are exact, so the order of product and sum does not count.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_VALUES = 1 << 12
"""Values of a program's tile, about. It changes no bit."""


@triton.jit
def rotate_kernel(
    x, positions, table, out, tokens, heads, stride_token, stride_head,
    BACKWARD: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate TOKENS tokens of x [tokens, heads, 2 * HALF] into `out`, which is contiguous."""
    token = (tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head, i = tl.arange(0, HEADS)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inside, in_table = (token < tokens) & (head < heads) & (i < HALF), (token < tokens) & (i < HALF)
    position = tl.load(positions + token, mask=token < tokens, other=0)
    cos = tl.load(table + position * (2 * HALF) + i, mask=in_table, other=0.0).to(tl.float32)
    sin = tl.load(table + position * (2 * HALF) + HALF + i, mask=in_table, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    at = token * stride_token + head * stride_head + i
    x1 = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = (token * heads + head) * (2 * HALF) + i
    tl.store(out + to, tl.fma(-x2, sin, x1 * cos).to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + HALF, tl.fma(x1, sin, x2 * cos).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("nemo_fp8rl::rotate", mutates_args=())
def rotate(x: Tensor, positions: Tensor, table: Tensor, backward: bool = False) -> Tensor:
    """Return x rotated by the table's rows at `positions`; contiguous.

    x:          [tokens, heads, d]
    positions:  int64 [tokens]
    table:      [length, d], in x's dtype: d/2 cosines, then d/2 sines
    backward:   rotate by the negative angle, as the gradient is
    """
    tokens, heads, d = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded_heads, block = triton.next_power_of_2(heads), triton.next_power_of_2(d // 2)
    per_program = max(1, TILE_VALUES // (padded_heads * block))
    if tokens:
        rotate_kernel[(triton.cdiv(tokens, per_program),)](
            x, positions, table, out, tokens, heads, x.stride(0), x.stride(1),
            BACKWARD=backward, TOKENS=per_program, HEADS=padded_heads, HALF=d // 2, BLOCK=block,
        )  # fmt: skip
    return out


@rotate.register_fake
def _(x: Tensor, positions: Tensor, table: Tensor, backward: bool = False) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep_angles(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, positions, table, ctx.backward_angle = inputs
    ctx.save_for_backward(positions, table)


def _rotate_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return rotate(grad, *ctx.saved_tensors, not ctx.backward_angle), None, None, None


rotate.register_autograd(_rotate_back, setup_context=_keep_angles)
