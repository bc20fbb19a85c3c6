"""Changes that leave the values of MXFP8 and NVFP4, on which the agreement of trainer and engine rests."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import (
    FORMATS,
    FP8,
    MXFP8,
    NVFP4,
    BlockScaled,
    Format,
    encode_scale,
    fake_quantize,
    fake_quantize_tokens,
    quantize_blockwise,
    with_lines,
)
from nemo_fp8rl.fp8.block_scaled import E2M1_VALUES, E4M3, scale_values

NVFP4_LINES = with_lines(NVFP4)
SMALLEST_NORMAL = 2.0**-6
EACH_NVFP4 = pytest.mark.parametrize("form", [NVFP4, NVFP4_LINES], ids=lambda form: form.name)


@st.composite
def matrices(draw: st.DrawFn, rows: int = 64, columns: int = 64, binades: int = 4) -> Tensor:
    """Random bf16 whose rows and columns have up to `binades` binades between them, and some zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-20, 20))
    x = x * 2.0 ** -torch.randint(0, binades + 1, (rows, 1), generator=generator)
    return torch.where(
        torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.3])), 0, x
    ).bfloat16()


# The global scale


@EACH_NVFP4
@settings(max_examples=40, deadline=None)
@given(x=matrices(), shift=st.integers(-12, 3))
def test_any_pow2_global_that_neither_saturates_nor_flushes_gives_the_same_values(form: Format, x, shift):
    usual = quantize_blockwise(x, format=form)
    other = quantize_blockwise(x, format=form, encode=encode_scale(x.abs().amax(), "pow2") * 2.0**shift)
    shifted = usual.scale_inv.float() * 2.0**shift
    fits = (shifted <= 448) & ((shifted >= SMALLEST_NORMAL) | (shifted == 0))
    blocks = fits.repeat_interleave(form.weight_block[0], 0).repeat_interleave(16, 1)
    assert torch.equal(other.dequantize()[blocks], usual.dequantize()[blocks])
    assert torch.equal(other.scale_inv.float()[fits], shifted[fits])
    assert torch.equal(other.data[blocks[:, ::2]], usual.data[blocks[:, ::2]])


def test_another_fp32_global_gives_other_values():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    usual = quantize_blockwise(x, format=NVFP4, scale_format="fp32")
    other = quantize_blockwise(x, format=NVFP4, scale_format="fp32", encode=encode_scale(1.01 * x.abs().amax(), "fp32"))
    assert (usual.dequantize() != other.dequantize()).float().mean() > 0.5


@settings(max_examples=40, deadline=None)
@given(x=matrices(binades=3))
def test_with_pow2_a_global_per_token_gives_the_values_of_one_per_tensor(x):
    per_token = fake_quantize_tokens(x, NVFP4, "pow2", torch.float32)
    per_tensor = quantize_blockwise(x, format=NVFP4, block=NVFP4.token_block)
    lost = (per_tensor.scale_inv.float() == 0).repeat_interleave(16, 1)  # flushed, which is a rule for weights
    assert torch.equal(per_token[~lost], per_tensor.dequantize()[~lost])
    for i in (0, 17):  # and a token's values depend on no other token
        assert torch.equal(fake_quantize_tokens(x[i : i + 1], NVFP4, "pow2", torch.float32)[0], per_token[i])


# Parts of a matrix


@pytest.mark.parametrize("form", [MXFP8, with_lines(MXFP8), NVFP4, NVFP4_LINES], ids=lambda form: form.name)
@settings(max_examples=20, deadline=None)
@given(x=matrices(128, 128))
def test_shards_with_the_factor_of_the_whole_are_parts_of_the_whole(form: Format, x):
    encode = encode_scale(x.abs().amax(), "pow2", headroom=4) if form.has_global else None

    def quantize(part: Tensor) -> BlockScaled:
        return quantize_blockwise(part, format=form, encode=encode)

    whole = quantize(x)
    for axis in (0, 1):  # column-parallel and row-parallel layers
        shards = [quantize(part) for part in x.chunk(2, axis)]
        assert torch.equal(torch.cat([shard.data.view(torch.uint8) for shard in shards], axis), bits(whole.data))
        assert torch.equal(torch.cat([bits(shard.scale_inv) for shard in shards], axis), bits(whole.scale_inv))
        assert all(shard.global_scale == whole.global_scale for shard in shards if form.has_global)
    stacked = quantize(torch.stack(x.chunk(2)))  # and as two experts
    assert torch.equal(bits(stacked.data).flatten(0, 1), bits(whole.data))


@settings(max_examples=20, deadline=None)
@given(x=matrices())
def test_large_blocks_are_small_blocks_with_the_scale_repeated(x):
    for form in (MXFP8, NVFP4):
        large, lines = quantize_blockwise(x, format=form), with_lines(form)
        scales = large.scale_inv.repeat_interleave(form.weight_block[0], 0)
        small = BlockScaled(large.data, scales, lines.weight_block, lines, large.global_scale)
        assert torch.equal(small.dequantize(), large.dequantize())


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


# Exactness


def test_every_nvfp4_code_times_every_scale_is_exact_in_bf16_with_a_pow2_global():
    codes, scales = torch.tensor(E2M1_VALUES), torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    products = codes[:, None] * scales * 2.0 ** torch.arange(-60.0, 60, 7)[:, None, None]
    assert torch.equal(products.bfloat16().float(), products)
    assert (products * 1.1 != (products * 1.1).bfloat16().float()).float().mean() > 0.5


def test_every_mxfp8_code_times_every_scale_that_weights_reach_is_exact_in_bf16():
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    scales = scale_values(torch.arange(8, 245, dtype=torch.uint8), MXFP8)
    products = codes[:, None] * scales
    assert torch.equal(products.bfloat16().float(), products)


def test_exactness_is_said_as_it_is():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for form in FORMATS.values():
        for scale_format in ("pow2", "fp32"):
            values = quantize_blockwise(x, format=form, scale_format=scale_format).dequantize()
            exact = torch.equal(values.bfloat16().float(), values)
            assert exact == form.is_exact_in_bf16(scale_format), (form.name, scale_format)


# Sizes


@pytest.mark.parametrize(
    ("form", "share"),
    [(with_lines(MXFP8), 0.516), (MXFP8, 0.501), (NVFP4_LINES, 0.282), (NVFP4, 0.252), (FP8, 0.501)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_bytes_of_a_weight_are_as_many_as_its_format_says(form: Format, share):
    x = torch.ones(256, 512, dtype=torch.bfloat16)
    quantized = quantize_blockwise(x, format=form)
    nbytes = quantized.data.nbytes + quantized.scale_inv.nbytes
    assert 8 * nbytes == form.bits_per_value * x.numel()
    assert share - 0.001 < nbytes / x.nbytes <= share


# The flush of small scales


@EACH_NVFP4
def test_a_block_is_flushed_if_its_scale_is_below_the_smallest_normal_e4m3(form: Format):
    """One block has the tensor's largest value, so that encode is 2^k; others have scales about 2^-6."""
    x = torch.zeros(16, 64)
    x[0, 0] = 2688.0  # encode = 1: a block's scale is its largest value / 6
    smallest = 6 * SMALLEST_NORMAL
    x[0, 16], x[0, 32], x[0, 48] = smallest, smallest * (1 - 2.0**-4), smallest * (1 - 2.0**-3)
    scales = quantize_blockwise(x, format=form).scale_inv.float()[0]
    assert scales.tolist() == [448.0, SMALLEST_NORMAL, SMALLEST_NORMAL, 0.0]  # the third rounds up to it
    flushed = quantize_blockwise(x, format=form)
    assert flushed.dequantize()[0, ::16].tolist()[1:] == [smallest, smallest, 0.0]
    kept = quantize_blockwise(x, format=form, scale_format="fp32").dequantize()
    assert kept[0, 48] > 0, "with float32 globals nothing is flushed, as in Transformer Engine"


@EACH_NVFP4
@settings(max_examples=30, deadline=None)
@given(x=matrices(binades=14))
def test_every_scale_that_travels_is_zero_or_normal_and_forward_multiplies_what_travels(form: Format, x):
    encode = encode_scale(x.abs().amax(), "pow2", headroom=4)
    stored = quantize_blockwise(x, format=form, encode=encode)
    scales = stored.scale_inv.float()
    assert ((scales == 0) | (scales >= SMALLEST_NORMAL)).all()
    multiplied = fake_quantize(x, format=form, block=form.weight_block, encode=encode, flush=True, dtype=torch.bfloat16)
    assert torch.equal(multiplied, stored.dequantize(torch.bfloat16))
