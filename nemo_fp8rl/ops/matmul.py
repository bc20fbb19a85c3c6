"""Matrix products whose rows do not depend on the batch: the tile is fixed, and K is walked in ascending order.

linear      bf16 operands, float32 sums, the bias is added before the one rounding
fp8_linear  y = fma(partial, scale_x * scale_w, y) for each 128 of K, one rounding. This is the order of DeepGEMM
            (impls/sm90_fp8_gemm_1d2d.cuh); with pow2 scales cuBLASLt and vLLM's Triton kernel add the same numbers
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.fp8 import quantize_activations
from nemo_fp8rl.fp8.linear import is_bf16_matmul_fast

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
FP8_BLOCK = 128
"""Columns of a tile of `fp8_linear`, and the values of K that share a scale."""


@triton.jit
def linear_kernel(
    x, weight, bias, out, m, n, k,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write one tile of out [m, n] = x [m, k] @ weight [n, k]^T + bias [n]."""
    columns = tl.cdiv(n, BLOCK_N)
    row = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        i = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row[:, None] * k + i[None, :], mask=(row[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight + column[None, :] * k + i[:, None], mask=(column[None, :] < n) & (i[:, None] < k), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")  # of float32 operands, which would be rounded to TF32
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    inside = (row[:, None] < m) & (column[None, :] < n)
    tl.store(out + row[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fp8_linear_kernel(
    x, weight, x_scale, weight_scale, out, m, n, k, stride_scale_m, stride_scale_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write one tile of out [m, n] of E4M3 x [m, k] and weight [n, k]; BLOCK_N divides 128, and BLOCK_K is 128."""
    columns = tl.cdiv(n, BLOCK_N)
    row = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(k, BLOCK_K)
    scales_w = weight_scale + first_column // BLOCK_K * blocks
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(blocks):
        i = block * BLOCK_K + tl.arange(0, BLOCK_K)
        a = tl.load(x + row[:, None] * k + i[None, :], mask=(row[:, None] < m) & (i[None, :] < k), other=0.0)
        b = tl.load(weight + column[None, :] * k + i[:, None], mask=(column[None, :] < n) & (i[:, None] < k), other=0.0)
        s = tl.load(x_scale + row * stride_scale_m + block * stride_scale_k, mask=row < m, other=0.0)
        scale = s * tl.load(scales_w + block)
        total = tl.fma(tl.dot(a, b), tl.broadcast_to(scale[:, None], (BLOCK_M, BLOCK_N)), total)
    inside = (row[:, None] < m) & (column[None, :] < n)
    tl.store(out + row[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("nemo_fp8rl::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias, [..., N], in x's dtype.

    x:       [..., K]
    weight:  [N, K], in x's dtype
    bias:    [N], or None
    """
    x, weight, (n, k) = x.contiguous(), weight.contiguous(), weight.shape
    out = x.new_empty((*x.shape[:-1], n))
    if m := x.numel() // k:
        linear_kernel[(triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N),)](
            x, weight, bias, out, m, n, k,
            HAS_BIAS=bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        )  # fmt: skip
    return out


@torch.library.custom_op("nemo_fp8rl::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, pow2: bool) -> Tensor:
    """Return Q(x) @ weight^T, [..., N], in x's dtype; Q quantizes blocks of 1x128. It has no gradient.

    x:                 [..., K], bf16
    weight:            E4M3 [N, K]
    weight_scale_inv:  float32 [ceil(N/128), ceil(K/128)]
    pow2:              the scales of x are powers of two
    """
    x2, (n, k) = x.reshape(-1, x.size(-1)), weight.shape
    out = x.new_empty((*x.shape[:-1], n))
    if m := len(x2):
        quantized = quantize_activations(x2, "pow2" if pow2 else "fp32")
        scale = quantized.scale_inv
        fp8_linear_kernel[(triton.cdiv(m, BLOCK_M) * triton.cdiv(n, FP8_BLOCK),)](
            quantized.data, weight, scale, weight_scale_inv, out, m, n, k, scale.stride(0), scale.stride(1),
            BLOCK_M=BLOCK_M, BLOCK_N=FP8_BLOCK, BLOCK_K=FP8_BLOCK,
        )  # fmt: skip
    return out


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.size(0)))


@fp8_linear.register_fake
def _(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, pow2: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.size(0)))


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.has_bias = inputs[2] is not None


def _linear_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Multiply by torch: a gradient need not be the engine's. Float32 is faster where bfloat16 matmuls are slow."""
    x, weight = ctx.saved_tensors
    dtype = x.dtype if is_bf16_matmul_fast() else torch.float32
    rows, x2 = grad.reshape(-1, grad.size(-1)).to(dtype), x.reshape(-1, x.size(-1)).to(dtype)
    grad_x = (rows @ weight.to(dtype)).to(x.dtype).view(x.shape)
    grad_bias = rows.sum(0, dtype=torch.float32).to(x.dtype) if ctx.has_bias else None
    return grad_x, (rows.t() @ x2).to(weight.dtype), grad_bias


linear.register_autograd(_linear_gradients, setup_context=_keep_operands)
