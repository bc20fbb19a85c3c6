"""Blocks, dtypes, formats and random values for the tests of kernels."""

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, ALONG_TOKENS

BLOCKS = [BLOCK, ALONG_LAST, ALONG_TOKENS]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["pow2", "fp32"]
INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
EACH_BLOCK = pytest.mark.parametrize("block", BLOCKS)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
EACH_FORMAT = pytest.mark.parametrize("scale_format", FORMATS)


def random_values(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int = 0) -> Tensor:
    """Return finite values: of one magnitude, of every magnitude at once, or denormal."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":
        x = torch.randint(-(2**31), 2**31, shape, generator=generator)
        x = (x >> (32 - 8 * dtype.itemsize)).to(INTEGER[dtype]).view(dtype)
    elif kind == "denormal":
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        x = torch.randint(-128, 128, shape, generator=generator).double() * smallest
    else:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * float(kind)
    x = x.to(dtype)
    return torch.where(torch.isfinite(x), x, 0)


def every_amax(rows: int, columns: int) -> Tensor:
    """Return bf16 [32639, rows, columns]: matrix i has the i-th positive finite bf16 as its largest magnitude."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).view(-1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.rand(amax.numel(), rows, columns, generator=generator) - 1).mul_(amax).bfloat16()
    x[:, rows // 3, columns // 2] = amax[:, 0, 0] * (1 - 2 * (torch.arange(amax.numel()) % 2))
    return x
