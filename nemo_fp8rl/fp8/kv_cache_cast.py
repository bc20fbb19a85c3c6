"""What an FP8 KV cache holds of a key or a value: x / scale cast to E4M3, times the scale.

The engine stores keys and values so when its cache is FP8; a trainer whose attention reads the same numbers agrees with
it (`policy/layers/kv_cache.py`). The rounding of the cast is the backend's: vLLM 0.32's CPU kernel cuts off what does
not fit (tests/fp8/test_kv_cache_cast.py: every bfloat16 value, on AVX-512). The cache for CPUs without that kernel
(`generation/fp8_method/on_cpu/emulated_cache.py`) rounds to nearest, and GPUs are expected to, which has not been
measured. Values beyond the largest, 448, become the largest.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from nemo_fp8rl.fp8.format import E4M3_MAX

CacheRounding = Literal["nearest", "toward_zero"]
SMALLEST_NORMAL, SUBNORMAL_STEP = 2.0**-6, 2.0**-9
DROPPED_BITS = (1 << 20) - 1
"""Mask of the bits that E4M3 drops: it keeps 3 of float32's 23 bits of mantissa."""


def can_vllm_read_fp8_cache() -> bool:
    """Whether vLLM has attention for this machine that reads an FP8 cache: on a CPU its `_get_attn_isa` in
    v1/attention/backends/cpu_attn.py says so.
    """
    return torch.cuda.is_available() or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def to_cache(x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
    """x, of any float dtype, as E4M3.

    scale: multiplies to dequantize; a power of two, so that neither product rounds.
    """
    scaled = (x.float() * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    return (_truncate(scaled) if rounding == "toward_zero" else scaled).to(torch.float8_e4m3fn)


def from_cache(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """E4M3 -> its values in `dtype`."""
    return (codes.float() * scale).to(dtype)


def cast_through_cache(x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
    """x as it is read back from the cache, in x's dtype, with the gradient of x itself (straight through)."""
    return _CastThroughCache.apply(x, scale, rounding)


class _CastThroughCache(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
        return from_cache(to_cache(x, scale, rounding), scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _truncate(x: Tensor) -> Tensor:
    """float32 of magnitude up to 448 -> the next E4M3 value toward zero."""
    normal = (x.contiguous().view(torch.int32) & ~DROPPED_BITS).view(torch.float32)
    return torch.where(x.abs() < SMALLEST_NORMAL, (x / SUBNORMAL_STEP).trunc() * SUBNORMAL_STEP, normal)
