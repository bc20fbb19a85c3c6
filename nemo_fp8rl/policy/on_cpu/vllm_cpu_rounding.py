"""The rounding of vLLM's kernels on this machine; trainer and engine must run on the same kind of device.

The facts come from vLLM 0.32 unless a docstring says otherwise (v1/attention/backends/cpu_attn.py, `_get_attn_isa`;
csrc/cpu/cpu_attn_impl.hpp, cpu_types_x86.hpp). They were measured on AVX2, on AVX-512 with and without its BF16
extension, and on AMX; the facts about GPUs are expected and not measured.
"""

import torch
from torch import Tensor

from nemo_fp8rl.common.vllm_version import installed_vllm, vllm_version
from nemo_fp8rl.fp8 import CacheRounding, can_vllm_read_fp8_cache


def cache_rounding() -> CacheRounding:
    """Return the rounding of keys and values in an FP8 cache: to nearest on a GPU and in an emulated cache."""
    return "nearest" if torch.cuda.is_available() or not can_vllm_read_fp8_cache() else "toward_zero"


def scales_scores(fp8_cache: bool) -> bool:
    """True if attention on a CPU scales scores, as on an FP8 cache that vLLM itself reads; else it scales queries."""
    return fp8_cache and can_vllm_read_fp8_cache()


def loses_denormals(dtype: torch.dtype) -> bool:
    """True if attention reads denormals of E4M3 as zero: in an FP8 cache, and in sums of its values."""
    return not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16


def rounds_probabilities(dtype: torch.dtype, head_dim: int) -> bool:
    """True if attention rounds exp(score - maximum) before it multiplies values; the dividing sum is not rounded.

    Matrix units need bfloat16 operands: AMX on a CPU, and FlashAttention on a GPU. AVX-512 multiplies in float32.
    """
    matrix_unit = torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()
    return matrix_unit and dtype is torch.bfloat16 and head_dim % 32 == 0


def truncates(dtype: torch.dtype) -> bool:
    """True if vLLM's own kernels (RoPE, attention, bfloat16 experts) truncate float32 to bfloat16.

    They do so on a CPU without an instruction that rounds.
    """
    return dtype is torch.bfloat16 and not torch.cuda.is_available() and not torch.cpu._is_avx512_bf16_supported()


def experts_are_dense_mlps() -> bool:
    """True if vLLM computes bfloat16 experts as dense MLPs, with a rounding of each linear.

    vLLM before 0.28 does so on a CPU without AVX-512, where its library lacks the kernel
    (layers/fused_moe/cpu_fused_moe.py, forward_torch).
    """
    has_kernel = torch.cuda.is_available() or torch.cpu._is_avx512_supported() or not installed_vllm()
    return not has_kernel and vllm_version() < (0, 28)


def sums_in_order(dtype: torch.dtype) -> bool:
    """True if attention without rounded probabilities must sum in the kernel's order (`avx_attention`).

    It must for 16-bit values on a CPU; the differences in float32 are smaller than its other roundings.
    """
    return dtype is not torch.float32 and not torch.cuda.is_available()


def experts_sum_in_order(dtype: torch.dtype) -> bool:
    """True if 16-bit experts must sum in the order of vLLM's vector kernel (`avx_experts`): on a CPU.

    AMX multiplies experts in bfloat16, and in no other dtype (layers/fused_moe/experts/cpu_moe.py).
    """
    uses_amx = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return sums_in_order(dtype) and not uses_amx


def round_as_kernel(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x, float32, to `dtype` as vLLM's kernels round; the gradient is that of a plain cast."""
    if truncates(dtype):
        truncated = (x.detach().view(torch.int32) & -(1 << 16)).view(torch.float32)
        x = truncated + (x - x.detach())
    return x.to(dtype)
