"""The FP8 contract: one quantizer for the trainer, the refit and the engine. Needs torch alone."""

from nemo_fp8rl.fp8.format import BLOCK, BlockScaled, NonFiniteError, ScaleFormat, is_quantized, scale_name
from nemo_fp8rl.fp8.linear import BlockwiseFp8Linear, blockwise_fp8_linear, fprop
from nemo_fp8rl.fp8.quantize import fake_quantize, quantize_blockwise

__all__ = [
    "BLOCK",
    "BlockScaled",
    "BlockwiseFp8Linear",
    "NonFiniteError",
    "ScaleFormat",
    "blockwise_fp8_linear",
    "fake_quantize",
    "fprop",
    "is_quantized",
    "quantize_blockwise",
    "scale_name",
]
