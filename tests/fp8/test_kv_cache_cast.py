"""`cast_through_cache` against the kernel that fills vLLM's FP8 KV cache on a CPU, and against torch's own cast."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch

from nemo_fp8rl.fp8 import cast_through_cache
from tests.conftest import needs_vllms_fp8_cache

HEADS, DIM, BLOCK = 2, 128, 128


def every_bfloat16() -> torch.Tensor:
    """All finite values, bfloat16 [65024 and some zeros, to fill blocks of HEADS * DIM]."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    return torch.nn.functional.pad(values, (0, -len(values) % (HEADS * DIM)))


def stored(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the values that vLLM's cache stores for x, float32; both are [tokens, HEADS, DIM]."""
    from vllm import _custom_ops as ops  # loads the library for this CPU

    tokens = len(x)
    cache = torch.zeros(-(-tokens // BLOCK), HEADS, BLOCK * 2, DIM, dtype=torch.uint8)
    keys, values = cache.chunk(2, 2)
    ops.cpu_attn_reshape_and_cache(x, x, keys, values, torch.arange(tokens), "vec", scale, scale, "fp8")
    codes = values.transpose(1, 2).reshape(-1, HEADS, DIM)[:tokens].contiguous()
    return codes.view(torch.float8_e4m3fn).float() * scale


@needs_vllms_fp8_cache
@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 4.0])
def test_cut_off_is_what_vllms_cpu_kernel_stores_of_every_value(scale):
    x = every_bfloat16().view(-1, HEADS, DIM)
    ours = cast_through_cache(x.float(), scale, "toward_zero")
    assert torch.equal(ours, stored(x, scale))


def test_nearest_is_torchs_cast():
    x = every_bfloat16().float()
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(cast_through_cache(x, 1.0, "nearest"), expected)
    assert torch.equal(
        cast_through_cache(x, 0.125, "nearest"), (x * 8).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 8
    )


@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
def test_a_cached_value_is_exact_in_bfloat16_and_caching_it_again_changes_nothing(rounding):
    x = every_bfloat16()
    once = cast_through_cache(x, 0.25, rounding)
    assert once.dtype == torch.bfloat16
    assert torch.equal(once.float(), cast_through_cache(x.float(), 0.25, rounding))
    assert torch.equal(cast_through_cache(once, 0.25, rounding), once)


def test_the_gradient_goes_straight_through():
    x = torch.tensor([0.3, -1000.0, 0.0001], requires_grad=True)
    cast_through_cache(x, 1.0, "toward_zero").backward(torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad.tolist() == [1.0, 2.0, 3.0]
