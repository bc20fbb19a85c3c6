"""The block quantization_config of a config.json, for our quantization method and for vLLM's own; needs no vLLM."""

from collections.abc import Iterable

from nemo_fp8rl.fp8 import FP8, Format, Fp8Layers
from nemo_fp8rl.generation.fp8_method.plugin import QUANTIZATION


def quantization_config(
    scale_format: str,
    fp8_layers: Fp8Layers,
    is_aligned: bool = False,
    uses_flash_attention_3: bool = False,
    format: Format = FP8,
    clamp_quantile: float | None = None,
) -> dict[str, object]:
    """Return the block for a model that our method serves, in HF's form.

    is_aligned:              the engine computes by the operations that it shares with the trainer; no layer need be
                             FP8 then
    uses_flash_attention_3:  attention of an aligned engine is FlashAttention 3 with one split
    clamp_quantile:          see `LinearRecipe`
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
    }


def config_for_vllm_fp8(linears: Iterable[str], scale_format: str, fp8_layers: Fp8Layers) -> dict[str, object]:
    """Return the block for a model that vLLM's own FP8 method serves as well.

    linears:  the names of the model's linear modules in vLLM
    """
    modules = ("lm_head", *(name for name in linears if not fp8_layers.quantizes(name)))
    return {
        **quantization_config(scale_format, fp8_layers),
        "quant_method": "fp8",
        "modules_to_not_convert": list(dict.fromkeys(modules)),  # without repeats
    }
