"""The delta of a kernel that does not find the changes while it quantizes: compare the bytes afterwards."""

from collections.abc import Callable

from torch import Tensor

from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.fp8.kernels.matrices import Stack
from nemo_fp8rl.fp8.names import Block, ScaleRule

Quantize = Callable[[Stack, Block, ScaleRule, Tensor, Tensor], None]
QuantizeDelta = Callable[[Stack, Block, ScaleRule, Tensor, Tensor, Tensor], Delta | None]


def make_quantize_delta(quantize: Quantize) -> QuantizeDelta:
    """Return the `quantize_delta` of a kernel, made from its `quantize`."""

    def quantize_delta(
        x: Stack, block: Block, rule: ScaleRule, base: Tensor, data: Tensor, scale_inv: Tensor
    ) -> Delta | None:
        """Quantize x, then return what differs from base, E4M3 [E, N, K]; None if too much differs to list it."""
        if base.data_ptr() == data.data_ptr():
            base = base.clone()
        quantize(x, block, rule, data, scale_inv)
        return Delta.between(base, data)

    return quantize_delta
