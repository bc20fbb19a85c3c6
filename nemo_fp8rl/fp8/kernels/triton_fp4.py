"""E2M1 in one pass over a GPU's memory: a program reads a tile of whole blocks, and writes it packed.

A tile has four dimensions (rows of blocks, rows in a block, blocks, columns in a block), so that a maximum over two of
them is that of each block. Every bit equals `reference`, for the reasons that `triton_kernels` gives.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E4M3
from nemo_fp8rl.fp8.kernels.matrices import Stack
from nemo_fp8rl.fp8.kernels.triton_kernels import (
    THREAD_VALUES,
    TILE_VALUES,
    e4m3,
    float32_bits,
    matrix_pointer,
    pointers_of,
)
from nemo_fp8rl.fp8.names import Block

STRIP_COLUMNS = 256
"""Columns of a tile: 512 bytes of bfloat16 in each row."""
STRIP_VALUES = 1 << 12


@triton.jit
def e4m3_value(value):
    """Return the nearest E4M3 value of a float32 value in 0 ... 448: the addend's last bit is E4M3's step there."""
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    addend = (exponent + (20 << 23)).to(tl.float32, bitcast=True)
    return (value + addend) - addend


@triton.jit
def e2m1(value):
    """Return the E2M1 code of a float32 value, as `on_cpu.bits.e2m1` does."""
    signed = value.to(tl.int32, bitcast=True)
    v = (signed & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    halves = (v + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    ones = (v + 8388608.0).to(tl.int32, bitcast=True) - (0x4B000000 - 2)
    twos = (v + 16777216.0).to(tl.int32, bitcast=True) - (0x4B800000 - 4)
    code = tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, 7))
    return (code | ((signed >> 28) & 8)).to(tl.uint8)


@triton.jit(do_not_specialize=["encode_stride"])
def quantize_fp4_tile(
    x, table, encode, data, scale_inv, n, k, stride_e, stride_n, stride_k, encode_rows, encode_stride,
    IS_TABLE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr,
    FLUSH: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of x [E, n, k]: A0 x A1 blocks of B0 x B1, each in P0 x P1 registers.

    x, table, IS_TABLE, IS_ALIGNED: from `pointers_of`
    encode: float32 [E, encode_rows]; the factor of a row of blocks is encode_stride behind that of the row before
    """
    scales_n, scales_k = (n + B0 - 1) // B0, (k + B1 - 1) // B1
    tiles_n, tiles_k = (scales_n + A0 - 1) // A0, (scales_k + A1 - 1) // A1
    tile = tl.program_id(0)  # only the first dimension of a grid may exceed 65535
    expert = (tile // tiles_k // tiles_n).to(tl.int64)  # int64, because a matrix may exceed 2^31 values
    i, j = (tile // tiles_k % tiles_n).to(tl.int64) * A0, (tile % tiles_k).to(tl.int64) * A1
    block_row, block_column = i + tl.arange(0, A0)[:, None, None, None], j + tl.arange(0, A1)[None, None, :, None]
    r, c = tl.arange(0, P0)[None, :, None, None], tl.arange(0, P1)[None, None, None, :]
    row, column = block_row * B0 + r, block_column * B1 + c
    in_row = (row < n) & (r < B0)
    matrix = matrix_pointer(x, table, expert, stride_e, IS_TABLE, IS_ALIGNED)
    values = tl.load(
        matrix + row * stride_n + column * stride_k,
        mask=in_row & (column < k) & (c < B1),
        other=0,
    )
    bits = float32_bits(values)
    amax_bits = tl.max(tl.max(bits & 0x7FFFFFFF, 3, keep_dims=True), 1, keep_dims=True)  # [A0, 1, A1, 1]

    is_block = (block_row < scales_n) & (block_column < scales_k)
    factor = tl.load(encode + expert * encode_rows + block_row * encode_stride, mask=block_row < scales_n, other=1.0)
    amax = amax_bits.to(tl.float32, bitcast=True)
    product = amax * (factor * tl.div_rn(1.0, tl.full([1, 1, 1, 1], 6.0, tl.float32)))
    is_nan = (amax_bits >= 0x7F800000) | (product != product)  # noqa: PLR0124 - NaN
    product = tl.where(product < 448.0, product, 448.0)
    inverse = e4m3_value(product)
    decode = tl.div_rn(1.0, factor)
    quotient = tl.div_rn(1.0, inverse * decode)
    scale = tl.where(quotient == float("inf"), 3.4028234663852886e38, quotient)
    code = e4m3(product)
    if FLUSH:
        scale = tl.where(inverse < 0.015625, 0.0, scale)
        code = tl.where(inverse < 0.015625, 0, code)
    scale = tl.where(is_nan, float("nan"), scale)
    code = tl.where(is_nan, 0x7F, code).to(tl.uint8)
    tl.store(scale_inv + (expert * scales_n + block_row) * scales_k + block_column, code, mask=is_block)

    codes = e2m1(bits.to(tl.float32, bitcast=True) * scale)
    even, odd = tl.split(tl.reshape(codes, [A0, P0, A1, P1 // 2, 2]))
    pair = tl.arange(0, P1 // 2)[None, None, None, :]
    place = block_column * (B1 // 2) + pair
    inside = in_row & (place < k // 2) & (pair < B1 // 2)
    tl.store(data + (expert * n + row) * (k // 2) + place, even | (odd << 4), mask=inside)


def quantize_fp4(x: Stack, block: Block, encode: Tensor, flush: bool, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x [E, N, K]; see `reference.quantize_fp4`.

    Raises: ValueError for a block that a program cannot hold, or of an odd number of columns
    """
    assert data.is_contiguous() and scale_inv.is_contiguous() and encode.is_contiguous() and scale_inv.dtype is E4M3
    p0, p1 = map(triton.next_power_of_2, block)
    if block[1] % 2 or p0 * p1 > TILE_VALUES:
        raise ValueError(
            f"the triton kernel takes 16x16, 1x16 and other blocks of an even number of columns and of up to "
            f"{TILE_VALUES} values, not {block[0]}x{block[1]}; the reference kernel takes any"
        )
    if x.numel() == 0:
        return
    a1 = max(1, STRIP_COLUMNS // p1)
    a0 = max(1, STRIP_VALUES // (p0 * a1 * p1))
    tiles = x.size(0) * triton.cdiv(scale_inv.size(1), a0) * triton.cdiv(scale_inv.size(2), a1)
    warps = triton.next_power_of_2(max(1, min(16, a0 * p0 * a1 * p1 // THREAD_VALUES // 32)))
    values, table, strides, *kind = pointers_of(x)
    with torch.cuda.device_of(data):
        quantize_fp4_tile[(tiles,)](
            values, table, encode, data, scale_inv.view(torch.uint8),
            *x.shape[1:], *strides, encode.size(1), int(encode.size(1) > 1),
            *kind, *block, p0, p1, a0, a1, flush,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
