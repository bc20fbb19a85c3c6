"""How the engine's kernels round on this machine: trainer and engine run on the same kind of device.

Read in vLLM 0.32, where nothing else is said (v1/attention/backends/cpu_attn.py, `_get_attn_isa`;
csrc/cpu/cpu_attn_impl.hpp, cpu_types_x86.hpp), and measured, but for AVX-512 without its BF16 extension; what GPUs do
is expected, not measured.
"""

import torch
from torch import Tensor

from nemo_fp8rl.common.vllm_version import installed_vllm, vllm_version
from nemo_fp8rl.config.schema import Fp8RlConfig
from nemo_fp8rl.fp8 import CacheRounding, can_vllm_read_fp8_cache


def is_aligned(choice: Fp8RlConfig) -> bool:
    """Whether the trainer rounds where vLLM's kernels for CPUs do: `nemo_fp8rl.align`."""
    return choice.align == "vllm" or (choice.align == "auto" and not torch.cuda.is_available())


def cache_rounding() -> CacheRounding:
    """How keys and values are rounded in an FP8 cache: to nearest on a GPU, and where the cache is emulated."""
    return "nearest" if torch.cuda.is_available() or not can_vllm_read_fp8_cache() else "toward_zero"


def scales_scores(fp8_cache: bool) -> bool:
    """Whether attention on a CPU scales scores, which it does on an FP8 cache that it reads itself, else queries."""
    return fp8_cache and can_vllm_read_fp8_cache()


def loses_denormals(dtype: torch.dtype) -> bool:
    """Whether attention takes what is below E4M3's normal numbers for zero: in an FP8 cache, and sums of its values."""
    return not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16


def rounds_probabilities(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention rounds exp(score - maximum) before it multiplies values; the sum that divides is not rounded.

    Matrix units want their operands in bfloat16: AMX here, as FlashAttention on a GPU. AVX-512 multiplies in float32.
    """
    matrix_unit = torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()
    return matrix_unit and dtype is torch.bfloat16 and head_dim % 32 == 0


def truncates(dtype: torch.dtype) -> bool:
    """Whether vLLM's own kernels (RoPE, attention, bfloat16 experts) cut float32 off to bfloat16: where no instruction
    rounds it.
    """
    return dtype is torch.bfloat16 and not torch.cuda.is_available() and not torch.cpu._is_avx512_bf16_supported()


def experts_are_dense_mlps() -> bool:
    """Whether bfloat16 experts are computed as dense MLPs are, each linear rounded: by vLLM before 0.28 on a CPU that
    has no AVX-512, where its library lacks the kernel (layers/fused_moe/cpu_fused_moe.py, forward_torch).
    """
    has_kernel = torch.cuda.is_available() or torch.cpu._is_avx512_supported() or not installed_vllm()
    return not has_kernel and vllm_version() < (0, 28)


def sums_in_order(dtype: torch.dtype) -> bool:
    """Whether attention is summed in the kernel's order, if it does not round probabilities: on a CPU (`ordered`)."""
    return dtype is torch.bfloat16 and not torch.cuda.is_available()


def as_kernels_round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, float32, in `dtype`, with the gradient of a plain cast."""
    if truncates(dtype):
        cut = (x.detach().view(torch.int32) & -(1 << 16)).view(torch.float32)
        x = cut + (x - x.detach())
    return x.to(dtype)
