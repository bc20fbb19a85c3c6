"""vLLM's `vllm.general_plugins` entry point: registers the quantization method `nemo_fp8rl`, and nothing else.

vLLM calls `register` in every process of an engine, whatever the model. So until a model asks for `nemo_fp8rl` nothing
is imported here but what vLLM's engine has loaded by then: what is registered is a name with a few answers, and the
method itself (`quantization.py`) loads when vLLM makes its config.
"""

from typing import Any

QUANTIZATION = "nemo_fp8rl"


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
        """Stands for `NemoFp8RlConfig`, which `from_config` makes; there are no instances of this class."""

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
            """An FP8 checkpoint is ours where the user says so; without that it is vLLM's."""
            asked = user_quant == QUANTIZATION and hf_quant_cfg.get("quant_method") == "fp8"
            return QUANTIZATION if asked else None

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []
