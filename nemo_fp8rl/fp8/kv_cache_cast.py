"""The values that an FP8 KV cache returns for a key or value: x / scale cast to E4M3, times the scale.

An engine with an FP8 cache stores keys and values in this form; a trainer whose attention reads the same numbers agrees
with it (`policy/layers/kv_cache.py`). The rounding of the cast depends on the backend: vLLM 0.32's CPU kernel truncates
(tests/fp8/test_kv_cache_cast.py: every bfloat16 value, on AVX-512). The cache for CPUs without that kernel
(`generation/fp8_method/on_cpu/emulated_cache.py`) rounds to nearest; GPUs are expected to do so too, which has not been
measured. Magnitudes above 448 become 448.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E4M3_MAX

CacheRounding = Literal["nearest", "toward_zero"]
SMALLEST_NORMAL, SUBNORMAL_STEP = 2.0**-6, 2.0**-9
DROPPED_BITS = (1 << 20) - 1
"""Mask of the bits that E4M3 drops: it keeps 3 of float32's 23 bits of mantissa."""


def can_vllm_read_fp8_cache() -> bool:
    """Return whether vLLM has attention for this machine that reads an FP8 cache.

    Source: vLLM v1/attention/backends/cpu_attn.py, `_get_attn_isa`, for CPUs
    """
    return torch.cuda.is_available() or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def to_cache(x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
    """Return x, of any float dtype, as the cache stores it, in E4M3.

    scale: multiplies to dequantize; a power of two, so that neither product rounds
    """
    scaled = (x.float() * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    return (_truncate(scaled) if rounding == "toward_zero" else scaled).to(torch.float8_e4m3fn)


def from_cache(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the values of E4M3 codes in `dtype`."""
    return (codes.float() * scale).to(dtype)


def cast_through_cache(x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
    """Return x as attention reads it from the cache, in x's dtype; the gradient passes straight through."""
    return _CastThroughCache.apply(x, scale, rounding)


class _CastThroughCache(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
        return from_cache(to_cache(x, scale, rounding), scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _truncate(x: Tensor) -> Tensor:
    """Round float32 values of magnitude up to 448 to the next E4M3 value toward zero."""
    normal = (x.contiguous().view(torch.int32) & ~DROPPED_BITS).view(torch.float32)
    return torch.where(x.abs() < SMALLEST_NORMAL, (x / SUBNORMAL_STEP).trunc() * SUBNORMAL_STEP, normal)
