"""The quantization method `nemo_fp8rl` of vLLM: which modules store FP8, and their kernels by device."""

import functools
from pkgutil import resolve_name
from typing import Any, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8KVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from nemo_fp8rl.fp8 import FORMATS, Fp8Layers, LinearRecipe
from nemo_fp8rl.fp8.kernels import load_emulation
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.fp8_method.low_rank import with_adapter, with_expert_adapters
from nemo_fp8rl.generation.fp8_method.stored_weights import QuantizedLinearMethod, QuantizedMoEMethod
from nemo_fp8rl.hf.adapters import NO_ADAPTERS, Adapters


class NemoFp8RlConfig(Fp8Config):
    """A format of `nemo_fp8rl.fp8`, in the layers that the config names. vLLM knows it as a kind of FP8.

    The config comes from `quant_method: nemo_fp8rl`, or from an exported checkpoint; `from_config` raises ValueError on
    any other.
    """

    recipe: LinearRecipe = LinearRecipe()
    is_aligned: bool = False
    """True where the engine computes by the operations that it shares with the trainer (`shared_ops`)."""
    uses_flash_attention_3: bool = False
    has_input_scales: bool = False
    """True where the checkpoint has static scales of activations, for vLLM's own method."""
    fp8_layers: Fp8Layers
    adapters: Adapters = NO_ADAPTERS

    @classmethod
    def get_name(cls) -> Any:
        return "nemo_fp8rl"

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # bfloat16, and Marlin's kernels; the kernels of FP8 need more, and say so

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]  # float32 beside adapters, where no layer is quantized

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NemoFp8RlConfig":
        if missing := sorted({"scale_format", "fp8_layers"} - config.keys()):
            raise ValueError(
                f"quantization {cls.get_name()}: the checkpoint's quantization_config lacks {' and '.join(missing)}, "
                "so it was not written by `nemo-fp8rl export`; leave its quantization to vLLM"
            )
        if (format := config.get("format", "fp8")) not in FORMATS:
            raise ValueError(
                f"quantization {cls.get_name()}: the checkpoint's quantization_config has the format {format!r}, which "
                "this version of nemo_fp8rl does not know; install that which exported it"
            )
        first, end, ignored = config["fp8_layers"]
        is_for_modelopt = "quant_algo" in config
        if is_for_modelopt:  # what follows reads a config of FP8
            config = config | {"quant_method": cls.get_name(), "activation_scheme": "dynamic"}
        method = cast(NemoFp8RlConfig, super().from_config(config))
        method.recipe = LinearRecipe(
            FORMATS[config.get("format", "fp8")], config["scale_format"], clamp_quantile=config.get("clamp_quantile")
        )
        method.fp8_layers = Fp8Layers(first, end, tuple(ignored))
        method.has_input_scales = (
            is_for_modelopt and method.recipe.format.has_global and bool(method.recipe.format.token_block)
        )
        if "adapters" in config:
            rank, alpha, modules = config["adapters"]
            method.adapters = Adapters(rank, alpha, frozenset(modules))
        method.is_aligned = config.get("is_aligned", False)
        method.uses_flash_attention_3 = config.get("uses_flash_attention_3", False)
        if method.is_aligned:
            _register_shared_operations()
        if current_platform.is_cpu():
            load_emulation("cpu")  # it imports numba, which must be imported before the next line
            vllm_compat.survive_scan_of_llvmlite()
        return method

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        method = self._base_method(layer, prefix)
        if isinstance(layer, LinearBase) and self.adapters.adapts(prefix):
            return with_adapter(method, self.adapters, self.is_aligned)
        has_expert_adapters = any(self.adapters.adapts(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj"))
        if isinstance(layer, RoutedExperts) and has_expert_adapters:
            return with_expert_adapters(method or bf16_experts(layer.moe_config), self.adapters, prefix)
        return method

    def _base_method(self, layer: Any, prefix: str) -> Any:
        linear, experts = methods_for_device(self.recipe)
        if self.is_aligned and (shared := self._shared_method(layer, prefix)):
            return shared
        if isinstance(layer, RoutedExperts) and self.fp8_layers.quantizes(prefix):
            return experts(layer.moe_config, self.recipe, self.has_input_scales)
        if isinstance(layer, Attention) and not self._has_refits:
            return Fp8KVCacheMethod(self)  # takes the scales of an FP8 cache from the checkpoint, or warns
        if not isinstance(layer, LinearBase):
            return None
        if self.fp8_layers.quantizes(prefix):
            return linear(self.recipe, self.has_input_scales)
        return UnquantizedLinearMethod()

    def _shared_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of an aligned engine for a layer that multiplies; None for attention."""
        from nemo_fp8rl.generation.fp8_method.shared_ops import experts, linears

        _register_shared_operations()  # the process of a rank gets this object without a call of `from_config`
        if isinstance(layer, VocabParallelEmbedding):
            return linears.SharedEmbeddingMethod()
        if isinstance(layer, RoutedExperts):
            if self.fp8_layers.quantizes(prefix):
                return experts.SharedFp8MoEMethod(layer.moe_config, self.recipe)
            return experts.SharedMoEMethod(layer.moe_config)
        if not isinstance(layer, LinearBase):
            return None
        if self.fp8_layers.quantizes(prefix):
            return linears.SharedFp8LinearMethod(self.recipe)
        return linears.SharedLinearMethod()

    @functools.cached_property
    def _has_refits(self) -> bool:
        """True where a refit brings the scales of an FP8 cache; the engine refuses to generate before.

        It is read while the model is built: vLLM asks for methods again after a reload, when its config may be missing.
        """
        extension = get_current_vllm_config().parallel_config.worker_extension_cls
        return bool(extension) and hasattr(resolve_name(extension), "nemo_fp8rl_load")


def _register_shared_operations() -> None:
    from nemo_fp8rl.generation.fp8_method.shared_ops.registration import register_shared_operations

    register_shared_operations()


def bf16_experts(moe: FusedMoEConfig) -> Any:
    """Return the method of experts in the model's dtype that have adapters."""
    if current_platform.is_cuda():
        from nemo_fp8rl.generation.fp8_method.gpu_experts import Bf16GroupedMoEMethod

        return Bf16GroupedMoEMethod(moe)
    from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_experts import Bf16MoEMethod

    return Bf16MoEMethod(moe)


def methods_for_device(recipe: LinearRecipe) -> tuple[type[QuantizedLinearMethod], type[QuantizedMoEMethod]]:
    """Return the methods of linear layers and of experts for this device. Raises ValueError where there are none.

    The quantizer is chosen and imported here, where vLLM builds the model, not when it traces or captures a forward.
    """
    if current_platform.is_cpu():
        load_emulation("cpu")
        from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_experts import EmulatedMoEMethod
        from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_linear import EmulatedLinearMethod

        return EmulatedLinearMethod, EmulatedMoEMethod
    if not current_platform.is_cuda():
        raise ValueError(f"quantization {NemoFp8RlConfig.get_name()} runs on CPUs and on NVIDIA's GPUs")
    from nemo_fp8rl.generation.fp8_method.gpu_formats.choice import gpu_methods

    return gpu_methods(recipe)
