"""vLLM's `vllm.general_plugins` entry point: registers the quantization method `nemo_fp8rl`, and nothing else.

vLLM calls `register` in every process of an engine. A model that does not ask for `nemo_fp8rl` never meets this code.
Its linear layers are the emulated ones of `fp8.linear`, by the same contract as the trainer's; they run on CPU, where
vLLM's own FP8 kernels need AMX.
"""

from nemo_fp8rl.fp8 import BLOCK, Fp8Layers

QUANTIZATION = "nemo_fp8rl"


def register() -> None:
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    if QUANTIZATION not in QUANTIZATION_METHODS:
        from nemo_fp8rl.generation.cpu_kernels import NemoFp8RlConfig

        register_quantization_config(QUANTIZATION)(NemoFp8RlConfig)


def quantization_config(scale_format: str, fp8_layers: Fp8Layers) -> dict[str, object]:
    """The `quantization_config` of a model that this method serves, in HF's form."""
    return {
        "quant_method": QUANTIZATION,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "scale_format": scale_format,
        "fp8_layers": [fp8_layers.first, fp8_layers.end, list(fp8_layers.ignored)],
    }
