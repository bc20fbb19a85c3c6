"""The `cpu` kernel of E2M1: the contract of NVFP4 at memory speed. `strips` divides the work; `fp4_loops` does it."""

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8.kernels.matrices import Stack
from nemo_fp8rl.fp8.kernels.on_cpu import fp4_loops
from nemo_fp8rl.fp8.kernels.on_cpu.strips import bits_of, run_on_strips, views
from nemo_fp8rl.fp8.names import Block, ScaleFormat

SOURCES = {"fp32": fp4_loops.FP32, "pow2": fp4_loops.POW2}


def quantize_fp4(x: Stack, block: Block, encode: Tensor, flush: bool, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x [E, N, K]; see `reference.quantize_fp4`."""
    assert data.is_contiguous() and scale_inv.is_contiguous()
    out, factors = (data.numpy(), scale_inv.view(torch.uint8).numpy()), encode.contiguous().numpy()

    def work(first: int, end: int) -> None:
        for strips in views(x, block, first, end):
            fp4_loops.quantize(*strips, *out, *block, factors, flush)

    run_on_strips(work, x, block)


def quantize_dequantize_fp4(
    x: Tensor, block: Block, encode: Tensor | ScaleFormat, flush: bool, dtype: torch.dtype
) -> Tensor:
    """Return the values that `quantize_fp4` stores for x [N, K]; see `emulate.quantize_dequantize_fp4`."""
    x = x[None]
    out = torch.empty(x.shape, dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
    source = SOURCES[encode] if isinstance(encode, str) else fp4_loops.GIVEN
    factors = encode[None].contiguous().numpy() if isinstance(encode, Tensor) else np.empty((1, 0), np.float32)

    def work(first: int, end: int) -> None:
        for strips in views(x, block, first, end):
            fp4_loops.quantize_dequantize(*strips, bits_of(out), *block, factors, source, flush)

    run_on_strips(work, x, block)
    return out[0].to(dtype)
