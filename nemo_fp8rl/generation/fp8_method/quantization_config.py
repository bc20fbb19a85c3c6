"""What a config.json says of FP8, to our quantization method and to vLLM's own; needs no vLLM."""

from collections.abc import Iterable

from nemo_fp8rl.fp8 import BLOCK, Fp8Layers
from nemo_fp8rl.generation.fp8_method.plugin import QUANTIZATION


def quantization_config(scale_format: str, fp8_layers: Fp8Layers) -> dict[str, object]:
    """The `quantization_config` of a model that this method serves, in HF's form."""
    return {
        "quant_method": QUANTIZATION,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "scale_format": scale_format,
        "fp8_layers": [fp8_layers.first, fp8_layers.end, list(fp8_layers.ignored_words)],
    }


def config_for_vllm_fp8(linears: Iterable[str], scale_format: str, fp8_layers: Fp8Layers) -> dict[str, object]:
    """The same for a model of these linear modules, by vLLM's names, that vLLM's own FP8 serves, too."""
    modules = ("lm_head", *(name for name in linears if not fp8_layers.quantizes(name)))
    return {
        **quantization_config(scale_format, fp8_layers),
        "quant_method": "fp8",
        "modules_to_not_convert": list(dict.fromkeys(modules)),  # each once
    }
