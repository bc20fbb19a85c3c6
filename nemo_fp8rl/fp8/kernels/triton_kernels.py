"""The contract in one pass over a GPU's memory: a program reads its tile once, keeps it in registers, writes it once.

A tile is one block, or several blocks where a block is one row high or one column wide, so that memory is read in whole
lines. Input of any strides is read in place, a transposed view through shared memory. Every bit equals `reference`:

- The maximum is taken over the bits of the values: as integers, infinity and NaN are above every number.
- Both divisions are IEEE divisions, no product and sum are fused, and denormals are kept.
- E4M3 rounding is the GPU's own conversion where it has one (compute capability 8.9), else integer arithmetic, as in
  `loops`.

Left out: a delta in the same pass, which on an H200 was slower, and wrong (docs/decisions.md); autotuning (a size
changes no bit); and blocks of more than 2^15 values, which registers do not hold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.fp8.delta import as_bytes
from nemo_fp8rl.fp8.kernels.compare_bytes import make_quantize_delta
from nemo_fp8rl.fp8.kernels.matrices import Matrices, Stack
from nemo_fp8rl.fp8.names import Block, ScaleRule

STRIP_VALUES = 1 << 14
"""Values handled at a time: a block of 128x128, which in strips takes longer (docs/decisions.md)."""
LINE_STRIP_VALUES = 1 << 12
"""The same for blocks of one line: 32 rows of 1x128, because there are matrices of few tokens."""
TILE_VALUES = 1 << 15
"""Most values that a program can hold in registers."""
THREAD_VALUES = 64
"""Values of a tile per thread, up to 16 warps; half or a quarter of it is as fast."""

IS_INTERPRETED = triton.knobs.runtime.interpret
"""True if the kernels below run on the CPU, value by value: TRITON_INTERPRET is read when they are defined."""


@triton.jit
def float32_bits(values):
    """Return the float32 bits, int32, of values in fp16, fp32, or bfloat16 as int16 (the upper half of float32)."""
    if values.dtype == tl.int16:
        return values.to(tl.int32) << 16
    return values.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def e4m3(value):
    """Return the E4M3 bits of a float32 value: nearest, ties to even, saturated at 448."""
    signed = value.to(tl.int32, bitcast=True)
    a = signed & 0x7FFFFFFF
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 E4M3 values are 2^-9 apart, as float32 values are around 2^14: adding 2^14 rounds to them.
    tiny = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(a < 0x3C800000, tiny, normal), 0x7E)
    return (code | ((signed >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e8m0_scale_inv(amax):
    """Return the smallest power of two not below amax / 448, at least 2^-127, which is a subnormal."""
    ratio = (amax * tl.div_rn(1.0, tl.full([1, 1], 448.0, tl.float32))).to(tl.int32, bitcast=True)
    exponent, mantissa = ratio >> 23, ratio & 0x7FFFFF
    is_between = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    return tl.maximum((exponent + is_between.to(tl.int32)) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def matrix_pointer(x, table, expert, stride_e, IS_TABLE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return the pointer to a matrix: `stride_e` values behind the one before, or where the table of addresses says.

    IS_ALIGNED: all addresses are multiples of 16 bytes, so that values can be read that many at a time
    """
    if IS_TABLE:
        pointer = tl.load(table + expert).to(tl.pointer_type(x.dtype.element_ty))
        if IS_ALIGNED:
            pointer = tl.multiple_of(pointer, 16)
    else:
        pointer = x + expert * stride_e
    return pointer


@triton.jit(do_not_specialize=["scale_stride_e", "scale_stride_n", "scale_stride_k"])
def quantize_tile(
    x, table, data, scale_inv, n, k, stride_e, stride_n, stride_k, scale_stride_e, scale_stride_n, scale_stride_k,
    largest,
    IS_TABLE: tl.constexpr, IS_ALIGNED: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, STRIPS: tl.constexpr,
    POW2: tl.constexpr, E8M0: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of x [E, n, k]: A0 x A1 blocks of B0 x B1, in STRIPS strips of S0 x S1, one below the other.

    x, table, IS_TABLE, IS_ALIGNED: from `pointers_of`
    largest: the largest finite value of x's dtype
    """
    A0: tl.constexpr = S0 if B0 == 1 else 1
    A1: tl.constexpr = S1 if B1 == 1 else 1
    scales_n, scales_k = (n + B0 - 1) // B0, (k + B1 - 1) // B1
    tiles_n, tiles_k = (scales_n + A0 - 1) // A0, (scales_k + A1 - 1) // A1
    tile = tl.program_id(0)  # only the first dimension of a grid may exceed 65535
    expert = (tile // tiles_k // tiles_n).to(tl.int64)  # int64, because a matrix may exceed 2^31 values
    i, j = (tile // tiles_k % tiles_n).to(tl.int64), (tile % tiles_k).to(tl.int64)
    r, c = tl.arange(0, S0)[:, None], tl.arange(0, S1)[None, :]
    matrix = matrix_pointer(x, table, expert, stride_e, IS_TABLE, IS_ALIGNED)
    column = j * (A1 * B1) + c
    in_row = (column < k) & (c < A1 * B1)

    strips = ()
    amax = tl.full([A0, A1], 0, tl.int32)
    for s in tl.static_range(STRIPS):
        row = i * (A0 * B0) + s * S0 + r
        inside = in_row & (row < n) & (s * S0 + r < A0 * B0)
        values = tl.load(matrix + row * stride_n + column * stride_k, mask=inside, other=0)
        strips += (values,)
        magnitude = float32_bits(values) & 0x7FFFFFFF  # [S0, S1] -> [A0, A1]
        if B1 > 1:
            magnitude = tl.max(magnitude, 1, keep_dims=True)
        if B0 > 1:
            magnitude = tl.max(magnitude, 0, keep_dims=True)
        amax = tl.maximum(amax, magnitude)

    # scale = 448 / amax; amax 0 -> 448 / 448; bits of 0x7F800000 and above are infinity and NaN
    scale = tl.div_rn(448.0, tl.where(amax == 0, 0x43E00000, amax).to(tl.float32, bitcast=True))
    scale = tl.where(scale == float("inf"), largest, scale)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    if E8M0:
        scale = tl.div_rn(1.0, e8m0_scale_inv(amax.to(tl.float32, bitcast=True)))
    scale = tl.where(amax < 0x7F800000, scale, float("nan"))
    block_row, block_column = i * A0 + tl.arange(0, A0)[:, None], j * A1 + tl.arange(0, A1)[None, :]
    tl.store(
        scale_inv + expert * scale_stride_e + block_row * scale_stride_n + block_column * scale_stride_k,
        tl.div_rn(1.0, scale),
        mask=(block_row < scales_n) & (block_column < scales_k),
    )

    for s in tl.static_range(STRIPS):
        row = i * (A0 * B0) + s * S0 + r
        inside = in_row & (row < n) & (s * S0 + r < A0 * B0)
        product = float32_bits(strips[s]).to(tl.float32, bitcast=True) * scale
        # the instruction of this cast saturates, as e4m3 does
        code = product.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else e4m3(product)
        tl.store(data + (expert * n + row) * k + column, code, mask=inside)


def quantize(x: Stack, block: Block, rule: ScaleRule, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x; see `Kernel`.

    Raises: ValueError for a block that a program cannot hold
    """
    rows, columns, strips = tile_layout(block)
    if x.numel() == 0:
        return
    tiles = x.size(0) * triton.cdiv(x.size(1), rows if block[0] == 1 else block[0])
    tiles *= triton.cdiv(x.size(2), columns if block[1] == 1 else block[1])
    warps = rows * columns * strips // THREAD_VALUES // 32
    native = not IS_INTERPRETED and torch.cuda.get_device_capability(x.device) >= (8, 9)
    values, table, strides, *kind = pointers_of(x)
    with torch.cuda.device_of(data):
        quantize_tile[(tiles,)](
            values, table, as_bytes(data), scale_inv,
            *x.shape[1:], *strides, *scale_inv.stride(), torch.finfo(x.dtype).max,
            *kind, *block, rows, columns, strips, rule == "pow2", rule == "e8m0", native,
            num_warps=triton.next_power_of_2(max(1, min(16, warps))), enable_fp_fusion=False,
        )  # fmt: skip


quantize_delta = make_quantize_delta(quantize)


def pointers_of(x: Stack) -> tuple[Tensor, Tensor | None, tuple[int, ...], bool, bool]:
    """Return values that have x's type (bfloat16 as int16), table, strides, and the two flags of `matrix_pointer`."""
    values = x[0] if isinstance(x, Matrices) else x
    values = values.view(torch.int16) if x.dtype is torch.bfloat16 else values
    if not isinstance(x, Matrices):
        return values, None, x.stride(), False, False
    return values, x.table, (0, *x.strides), True, not any(address % 16 for address in x.addresses)


def tile_layout(block: Block) -> tuple[int, int, int]:
    """Return the rows and columns of a strip, powers of two, and the number of strips in a tile."""
    b0, b1 = map(triton.next_power_of_2, block)
    values = LINE_STRIP_VALUES if 1 in (b0, b1) else STRIP_VALUES
    columns = b1 if b1 > 1 else max(1, 2 * values // b0)
    rows = max(1, values // columns)
    rows, strips = (rows, 1) if b0 == 1 else (min(rows, b0), triton.cdiv(block[0], min(rows, b0)))
    if rows * columns * strips > TILE_VALUES:
        raise ValueError(
            f"the triton kernel takes 128x128, 1x128, 128x1 and other blocks of up to {TILE_VALUES} values, "
            f"not {block[0]}x{block[1]}; the reference kernel takes any"
        )
    return rows, columns, strips
