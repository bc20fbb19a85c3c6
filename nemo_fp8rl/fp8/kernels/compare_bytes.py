"""Deltas of a kernel that does not find them as it quantizes: from the bytes, afterwards."""

from collections.abc import Callable

from torch import Tensor

from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.fp8.names import Block, ScaleFormat

Quantize = Callable[[Tensor, Block, ScaleFormat, Tensor, Tensor], None]
QuantizeDelta = Callable[[Tensor, Block, ScaleFormat, Tensor, Tensor, Tensor], Delta | None]


def comparing(quantize: Quantize) -> QuantizeDelta:
    """`quantize_delta` of the kernel that this is the `quantize` of."""

    def quantize_delta(
        x: Tensor, block: Block, scale_format: ScaleFormat, base: Tensor, data: Tensor, scale_inv: Tensor
    ) -> Delta | None:
        """`quantize`, then what differs from base, E4M3 [E, N, K]; None if that is too much to list."""
        if base.data_ptr() == data.data_ptr():
            base = base.clone()
        quantize(x, block, scale_format, data, scale_inv)
        return Delta.between(base, data)

    return quantize_delta
