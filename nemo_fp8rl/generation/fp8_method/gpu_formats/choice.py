"""Which method multiplies a format on the GPU of this process."""

import logging

from nemo_fp8rl.common.vllm_version import NEWER, vllm_version
from nemo_fp8rl.fp8 import FP8, LinearRecipe
from nemo_fp8rl.fp8.kernels import load, load_fp4
from nemo_fp8rl.generation.fp8_method.stored_weights import QuantizedLinearMethod, QuantizedMoEMethod

logger = logging.getLogger(__name__)


def gpu_methods(recipe: LinearRecipe) -> tuple[type[QuantizedLinearMethod], type[QuantizedMoEMethod]]:
    """Return the methods of linear layers and of experts for a recipe. Raises ValueError where there are none.

    The quantizers are chosen and imported here.
    """
    load("auto", "cuda")
    if recipe.format == FP8:
        from nemo_fp8rl.generation.fp8_method.gpu_experts import NativeFp8MoEMethod
        from nemo_fp8rl.generation.fp8_method.gpu_linear import NativeFp8LinearMethod

        return NativeFp8LinearMethod, NativeFp8MoEMethod
    if vllm_version() < NEWER:
        raise ValueError(
            f"{recipe.format.name} on a GPU needs the kernels of vLLM {NEWER[0]}.{NEWER[1]}; install it, or set "
            "nemo_fp8rl.flow=fp8_e2e"
        )
    format, is_fp4 = recipe.format, recipe.format.element == "e2m1"
    if is_fp4 and recipe.scale_format != "pow2":  # Marlin would lose blocks of small scales, which pow2 flushes
        raise ValueError(
            f"nemo_fp8rl.scale_format={recipe.scale_format} with {format.name} has no kernel on a GPU that multiplies "
            "the trainer's numbers; set nemo_fp8rl.scale_format=pow2"
        )
    from nemo_fp8rl.generation.fp8_method.gpu_formats.marlin_experts import MarlinMoEMethod
    from nemo_fp8rl.generation.fp8_method.gpu_formats.marlin_linear import MarlinLinearMethod

    if format.token_block is None:
        return MarlinLinearMethod, MarlinMoEMethod
    from nemo_fp8rl.generation.fp8_method.gpu_formats import blackwell_linear

    if is_fp4:
        load_fp4("auto", "cuda")
        native, reason = blackwell_linear.BlackwellNvfp4LinearMethod, blackwell_linear.why_no_nvfp4()
    else:
        native, reason = blackwell_linear.BlackwellMxfp8LinearMethod, blackwell_linear.why_no_mxfp8()
    if not reason:
        return native, MarlinMoEMethod
    logger.info("Marlin multiplies %s, with activations that were rounded before: %s", format.name, reason)
    return MarlinLinearMethod, MarlinMoEMethod
