"""vLLM's `vllm.general_plugins` entry point: registers the quantization method `nemo_fp8rl`, and nothing else.

vLLM calls `register` in every process of an engine, whatever the model. So nothing is imported that vLLM's engine has
not loaded by then, until a model uses `nemo_fp8rl`: a small class is registered, and the method itself
(`quantization.py`) is imported when vLLM makes its config.
"""

from typing import Any

QUANTIZATION = "nemo_fp8rl"
MODELOPT = "modelopt"
"""The method of vLLM that reads exported MXFP8 and NVFP4."""


def register() -> None:
    """Make `nemo_fp8rl` known to vLLM; a second call changes nothing."""
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        QuantizationConfig,
        register_quantization_config,
    )

    if QUANTIZATION in QUANTIZATION_METHODS:
        return

    @register_quantization_config(QUANTIZATION)
    class NemoFp8Rl(QuantizationConfig):
        """Stands for `NemoFp8RlConfig`, which `from_config` returns; this class has no instances."""

        def __new__(cls) -> Any:
            raise ValueError(
                f"quantization={QUANTIZATION}: the model's config.json has no quantization_config; give a folder that "
                "`nemo-fp8rl export` wrote"
            )

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            from nemo_fp8rl.generation.fp8_method.quantization import NemoFp8RlConfig

            return NemoFp8RlConfig.from_config(config)

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
        ) -> str | None:
            """Take an exported checkpoint where the user names our method; otherwise vLLM's own method takes it."""
            is_ours = user_quant == QUANTIZATION and hf_quant_cfg.get("quant_method") in ("fp8", MODELOPT)
            return QUANTIZATION if is_ours else None

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []
