"""SiLU times the gate's partner: (gate / (1 + exp(-gate))) * up in float32, with one rounding."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.ops.elementary import exp

BLOCK, TILE_VALUES = 1024, 1 << 12
"""Most columns, and all values, of a program's tile: short rows are taken together. They change no bit."""


@triton.jit
def silu_mul_kernel(gate_up, out, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK columns of ROWS rows of out [rows, size], of gate_up [rows, 2 * size]."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside, at = (row < rows) & (column < size), row * 2 * size + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + size, mask=inside, other=0.0).to(tl.float32)
    value = tl.div_rn(gate, 1.0 + exp(-gate)) * up
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward_kernel(gate_up, grad, grad_gate_up, rows, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of gate_up [rows, 2 * size] for BLOCK columns of ROWS rows."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside, at = (row < rows) & (column < size), row * 2 * size + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + size, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * size + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + exp(-gate))
    d_gate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_up + at, d_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
    tl.store(grad_gate_up + at + size, (dy * gate * sigmoid).to(grad_gate_up.dtype.element_ty), mask=inside)


@torch.library.custom_op("nemo_fp8rl::silu_mul", mutates_args=())
def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., I], of gate_up [..., 2 * I], whose first half is the gate; in its dtype."""
    gate_up, size = gate_up.contiguous(), gate_up.size(-1) // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if rows := out.numel() // size:
        grid, tile = _tiles(rows, size)
        silu_mul_kernel[grid](gate_up, out, rows, size, **tile)
    return out


@torch.library.custom_op("nemo_fp8rl::silu_mul_backward", mutates_args=())
def silu_mul_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of gate_up, in its dtype, for `grad` [..., I]."""
    gate_up, size, out = (
        gate_up.contiguous(),
        grad.size(-1),
        torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device),
    )
    if rows := grad.numel() // size:
        grid, tile = _tiles(rows, size)
        silu_mul_backward_kernel[grid](gate_up, grad.contiguous(), out, rows, size, **tile)
    return out


def _tiles(rows: int, size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return (the grid, the constants of a tile)."""
    columns = min(BLOCK, triton.next_power_of_2(size))
    at_once = TILE_VALUES // columns
    return (triton.cdiv(rows, at_once), triton.cdiv(size, columns)), {"ROWS": at_once, "BLOCK": columns}


@silu_mul.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.size(-1) // 2))


@silu_mul_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> Tensor:
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


def _keep_gate_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


silu_mul.register_autograd(lambda ctx, grad: silu_mul_backward(*ctx.saved_tensors, grad), setup_context=_keep_gate_up)
