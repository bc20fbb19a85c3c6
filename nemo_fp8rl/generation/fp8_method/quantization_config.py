"""The block quantization_config of a config.json, for our quantization method and for vLLM's own; needs no vLLM."""

from collections.abc import Iterable

from nemo_fp8rl.fp8 import FP8, Format, Fp8Layers, with_lines
from nemo_fp8rl.generation.fp8_method.plugin import MODELOPT, QUANTIZATION
from nemo_fp8rl.hf.adapters import Adapters


def quantization_config(
    scale_format: str,
    fp8_layers: Fp8Layers,
    is_aligned: bool = False,
    uses_flash_attention_3: bool = False,
    format: Format = FP8,
    clamp_quantile: float | None = None,
    adapters: Adapters | None = None,
) -> dict[str, object]:
    """Return the block for a model that our method serves, in HF's form.

    is_aligned:              the engine computes by the operations that it shares with the trainer; no layer need be
                             FP8 then
    uses_flash_attention_3:  attention of an aligned engine is FlashAttention 3 with one split
    clamp_quantile:          see `LinearRecipe`
    adapters:                of the model
    """
    flags = {"is_aligned": is_aligned, "uses_flash_attention_3": uses_flash_attention_3}
    return {
        "quant_method": QUANTIZATION,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(format.weight_block),
        "format": format.name,
        "scale_format": scale_format,
        "fp8_layers": [fp8_layers.first, fp8_layers.end, list(fp8_layers.ignored_words)],
        **({} if clamp_quantile is None else {"clamp_quantile": clamp_quantile}),
        **{name: True for name, is_set in flags.items() if is_set},
        **({"adapters": [adapters.rank, adapters.alpha, sorted(adapters.modules)]} if adapters else {}),
    }


def config_for_vllm_fp8(linears: Iterable[str], scale_format: str, fp8_layers: Fp8Layers) -> dict[str, object]:
    """Return the block for a model that vLLM's own FP8 method serves as well.

    linears:  the names of the model's linear modules in vLLM
    """
    block = {
        **quantization_config(scale_format, fp8_layers),
        "quant_method": "fp8",
        "modules_to_not_convert": _kept_modules(linears, fp8_layers),
    }
    del block["format"]  # FP8 is the only format of this method
    return block


def config_for_vllm_modelopt(
    linears: Iterable[str], scale_format: str, fp8_layers: Fp8Layers, format: Format
) -> dict[str, object]:
    """Return the block for a model in MXFP8 or NVFP4 that vLLM's method `modelopt` serves as well.

    linears:  the names of the model's linear modules in vLLM
    format:   of the model; scales of square blocks are repeated in the checkpoint, so that its blocks are lines
    """
    in_lines = engine_format(format)
    algorithm = "MXFP8" if format.element == "e4m3" else "NVFP4" if format.token_block else "W4A16_NVFP4"
    return {
        "quant_method": MODELOPT,
        "quant_algo": algorithm,
        "group_size": in_lines.weight_block[1],
        "ignore": _kept_modules(linears, fp8_layers),
        **{
            key: value
            for key, value in quantization_config(scale_format, fp8_layers, format=in_lines).items()
            if key in ("format", "scale_format", "fp8_layers")
        },
    }


def engine_format(format: Format) -> Format:
    """Return the format with a row of scales for as many rows of a weight as vLLM's kernels expect."""
    return format if format.weight_block[0] == format.engine_rows else with_lines(format)


def _kept_modules(linears: Iterable[str], fp8_layers: Fp8Layers) -> list[str]:
    modules = ("lm_head", *(name for name in linears if not fp8_layers.quantizes(name)))
    return list(dict.fromkeys(modules))  # without repeats
