"""The FP8 contract: one quantizer that the trainer, the refit and the engine share.

`kernels/reference.py` specifies it; `quantize_blockwise` is the entry point. The package needs torch, and its faster
kernels numba or Triton. Names load at their first use: those of `names`, `formats` and `layers`, which recipes need,
load without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_fp8rl.fp8.block_scaled import BlockScaled, NonFiniteError, empty_block_scaled, scale_shape
    from nemo_fp8rl.fp8.delta import Delta, DeltaError
    from nemo_fp8rl.fp8.formats import FLOW_FORMATS, FORMATS, FP8, MXFP8, NVFP4, NVFP4_A16, Format, with_lines
    from nemo_fp8rl.fp8.kernels import KernelError
    from nemo_fp8rl.fp8.kernels.matrices import Matrices
    from nemo_fp8rl.fp8.kv_cache_cast import (
        CacheRounding,
        can_vllm_read_fp8_cache,
        cast_through_cache,
        from_cache,
        to_cache,
    )
    from nemo_fp8rl.fp8.kv_scales import CalibrationError, KvMaxima, KvScales
    from nemo_fp8rl.fp8.layers import Fp8Layers, scale_name
    from nemo_fp8rl.fp8.linear import LinearRecipe, QuantizedLinear, fprop, quantized_linear
    from nemo_fp8rl.fp8.names import BLOCK, FP8_TOKENS, Block, KernelName, ScaleFormat
    from nemo_fp8rl.fp8.quantize import (
        encode_scale,
        fake_quantize,
        fake_quantize_tokens,
        largest_magnitude,
        quantize_activations,
        quantize_blockwise,
        quantize_delta,
        quantize_tokens_fp4,
    )

__all__ = [
    "BLOCK",
    "FLOW_FORMATS",
    "FORMATS",
    "FP8",
    "FP8_TOKENS",
    "MXFP8",
    "NVFP4",
    "NVFP4_A16",
    "Block",
    "BlockScaled",
    "CacheRounding",
    "CalibrationError",
    "Delta",
    "DeltaError",
    "Format",
    "Fp8Layers",
    "KernelError",
    "KernelName",
    "KvMaxima",
    "KvScales",
    "LinearRecipe",
    "Matrices",
    "NonFiniteError",
    "QuantizedLinear",
    "ScaleFormat",
    "can_vllm_read_fp8_cache",
    "cast_through_cache",
    "empty_block_scaled",
    "encode_scale",
    "fake_quantize",
    "fake_quantize_tokens",
    "fprop",
    "from_cache",
    "largest_magnitude",
    "quantize_activations",
    "quantize_blockwise",
    "quantize_delta",
    "quantize_tokens_fp4",
    "quantized_linear",
    "scale_name",
    "scale_shape",
    "to_cache",
    "with_lines",
]

_MODULES = (
    *(
        "names",
        "formats",
        "layers",
        "block_scaled",
        "kernels",
        "delta",
        "kv_cache_cast",
        "kv_scales",
        "kernels.matrices",
        "quantize",
        "linear",
    ),
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
    value = next(getattr(module, name) for module in modules if hasattr(module, name))
    globals()[name] = value
    return value
