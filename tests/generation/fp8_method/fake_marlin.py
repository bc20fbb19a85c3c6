"""Fakes of the compiled functions of vLLM that a CPU build lacks: Marlin's and CUTLASS's matmuls.

They read the very tensors that those kernels read, undo vLLM's layouts, and multiply in float32. Marlin's repacking of
weights is left out: `fake_repack` returns what it is given.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms

from nemo_fp8rl.fp8.block_scaled import E4M3, e2m1_values, scale_values
from nemo_fp8rl.fp8.formats import MXFP8

MODULES = "nemo_fp8rl.generation.fp8_method.gpu_formats"
BIAS = 2.0**126
"""The factor by which Marlin's scales are larger, because it reads the exponent of E2M1 as one of bfloat16."""


def fake_repack(b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Tensor:
    """[K * bits / 32, N] -> the shape of Marlin's weights, [K / 16, N * bits / 2], without its order."""
    assert b_q_weight.shape == (size_k * num_bits // 32, size_n)
    return b_q_weight.reshape(size_k // 16, size_n * num_bits // 2).clone()


def unpacked(weight: Tensor, size_n: int, bits: int) -> Tensor:
    """The values, float32 [N, K], of a weight that `fake_repack` returned."""
    by_rows = weight.reshape(-1, size_n).t().contiguous()
    return e2m1_values(by_rows.view(torch.uint8)) if bits == 4 else by_rows.view(E4M3).float()


def in_rows(scales: Tensor, size_n: int) -> Tensor:
    """Undo Marlin's order of scales, [K / block, N] -> [N, K / block]."""
    permutation = torch.tensor(get_scale_perms()[0])
    scales = scales.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, len(permutation))
    original = torch.empty_like(scales)
    original[:, permutation] = scales
    return original.reshape(-1, size_n).t()


def marlin_weight(weight: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
    """The values, float32 [N, K], that Marlin multiplies."""
    n = scales.size(1)
    if global_scale is None:
        values, block = unpacked(weight, n, 8), 32
        of_blocks = scale_values(in_rows(scales.view(torch.uint8), n), MXFP8)
    else:
        values, block = unpacked(weight, n, 4), 16
        halves = (in_rows(scales.view(torch.uint8), n).to(torch.int16) << 7).view(torch.float16)
        of_blocks = (halves.double() * global_scale.double() / BIAS).float()
    return values * of_blocks.repeat_interleave(block, 1)


def fake_marlin(x: Tensor, weight: Tensor, scales: Tensor, *rest: Any) -> Tensor:
    """Stands in for `apply_fp4_marlin_linear` (with a global scale) and `apply_mxfp8_marlin_linear`."""
    *global_scale, workspace, n, k = rest
    values = marlin_weight(weight, scales, *(global_scale or [None]))
    assert workspace is None
    return (x.float() @ values[:n, :k].t()).to(x.dtype)


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Rows and columns of scales in the order of Blackwell's matmuls; one element at a time, from its definition."""
    flat, wide = scales.reshape(-1), -(-columns // 4)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (row // 128) * wide + column // 4
    return flat.view(torch.uint8)[tile * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + column % 4].view(scales.dtype)


def fake_fp4_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
    """Stands in for `cutlass_scaled_fp4_mm`."""
    k = 2 * a.size(1)
    values = [
        e2m1_values(x) * unswizzled(s, len(x), k // 16).float().repeat_interleave(16, 1)
        for x, s in ((a, scale_a), (b, scale_b))
    ]
    assert alpha.shape == (1,)
    return (values[0] @ values[1].t() * alpha).to(dtype)


def fake_mm_mxfp8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, backend: str
) -> Tensor:
    """Stands in for FlashInfer's `mm_mxfp8`, which takes the weight as a transposed view."""
    values = [
        x.float() * scale_values(unswizzled(s, len(x), x.size(1) // 32), MXFP8).repeat_interleave(32, 1)
        for x, s in ((a, scale_a), (b.t(), scale_b))
    ]
    assert backend == "cutlass"
    return (values[0] @ values[1].t()).to(out_dtype)


def use_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops

    from nemo_fp8rl.generation.fp8_method.gpu_formats import blackwell_linear, marlin_linear

    monkeypatch.setattr(_custom_ops, "gptq_marlin_repack", fake_repack, raising=False)
    monkeypatch.setattr(marlin_linear, "apply_fp4_marlin_linear", fake_marlin)
    monkeypatch.setattr(marlin_linear, "apply_mxfp8_marlin_linear", fake_marlin)
    monkeypatch.setattr(blackwell_linear, "cutlass_scaled_fp4_mm", fake_fp4_mm)
    monkeypatch.setattr(blackwell_linear.vllm_flashinfer, "mm_mxfp8", fake_mm_mxfp8, raising=False)
