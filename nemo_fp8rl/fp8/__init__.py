"""The FP8 contract: one quantizer for the trainer, the refit and the engine. Needs torch alone; its kernels more."""

from nemo_fp8rl.fp8.delta import Delta, DeltaError
from nemo_fp8rl.fp8.format import (
    BLOCK,
    Block,
    BlockScaled,
    NonFiniteError,
    ScaleFormat,
    scale_shape,
)
from nemo_fp8rl.fp8.kernels import KernelError, KernelName
from nemo_fp8rl.fp8.kv_cache import CacheRounding, cached
from nemo_fp8rl.fp8.kv_scales import CalibrationError, KvScales, KvSketches
from nemo_fp8rl.fp8.layers import Fp8Layers, scale_name
from nemo_fp8rl.fp8.linear import BlockwiseFp8Linear, blockwise_fp8_linear, fprop
from nemo_fp8rl.fp8.quantize import fake_quantize, quantize_blockwise, quantize_delta

__all__ = [
    "BLOCK",
    "Block",
    "BlockScaled",
    "BlockwiseFp8Linear",
    "CacheRounding",
    "CalibrationError",
    "Delta",
    "DeltaError",
    "Fp8Layers",
    "KernelError",
    "KernelName",
    "KvScales",
    "KvSketches",
    "NonFiniteError",
    "ScaleFormat",
    "blockwise_fp8_linear",
    "cached",
    "fake_quantize",
    "fprop",
    "quantize_blockwise",
    "quantize_delta",
    "scale_name",
    "scale_shape",
]
