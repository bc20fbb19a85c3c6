"""Layer specs: the classes from which Megatron Core builds a transformer layer.

A spec combines two choices. Precision: `ColumnParallelLinear` or its FP8 sibling. Alignment: Megatron's own norm,
residual and attention, or those of `aligned_layers`. Nothing in Megatron is patched; a spec is its public way to
replace a class.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.fp8 import Fp8Layers, ScaleFormat
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.shared_operations import Shapes
from nemo_fp8rl.ops.alignment import Alignment, choose_alignment
from nemo_fp8rl.policy.layers.aligned_experts import AlignedExperts, AlignedMoELayer
from nemo_fp8rl.policy.layers.aligned_layers import AlignedAttention, AlignedRMSNorm, aligned_residual_add, norm_weight
from nemo_fp8rl.policy.layers.attention import CoreAttention, SdpaAttention, make_attention_class
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.linears import bf16_linears, fp8_linears, make_qkv_by_kind
from nemo_fp8rl.policy.layers.rope import Rope
from nemo_fp8rl.policy.weights.layout import Layout


class RMSNorm(torch.nn.Module):
    """torch's RMSNorm with weights in the parameters' dtype (Megatron's WrappedTorchNorm has float32 weights)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class LayerClasses:
    """The classes of one alignment for what surrounds the FP8 matmuls.

    linears:      (column-parallel, row-parallel) in the weights' precision
    fp8_linears:  the same in FP8, where Transformer Engine does not multiply
    activation:   the class for gate and up; None leaves them to Megatron
    """

    norm: type
    residual_add: Callable[..., Any]
    attention: type[CoreAttention]
    linears: tuple[type, type]
    fp8_linears: tuple[type, type]
    activation: type | None = None
    experts: type = SequentialMLP
    moe_layer: type = MoELayer


def layer_classes(alignment: Alignment, scale_format: ScaleFormat, flash_attention_3: bool = False) -> LayerClasses:
    """Return the layers that round as this alignment says.

    flash_attention_3:  with shared operations, take attention from FlashAttention 3
    """
    if alignment == "none":
        linears, fp8 = bf16_linears(False), fp8_linears(scale_format, False)
        return LayerClasses(RMSNorm, get_bias_dropout_add, SdpaAttention, linears, fp8)
    if alignment == "vllm_cpu":
        linears, fp8 = bf16_linears(True), fp8_linears(scale_format, True)
        moe = {"experts": AlignedExperts, "moe_layer": AlignedMoELayer}
        return LayerClasses(AlignedRMSNorm, aligned_residual_add, AlignedAttention, linears, fp8, **moe)
    from nemo_fp8rl.policy.layers.shared_ops import dense_layers as shared
    from nemo_fp8rl.policy.layers.shared_ops.attention import FlashAttention, SharedAttention
    from nemo_fp8rl.policy.layers.shared_ops.experts import SharedMoELayer

    linears, fp8 = shared.linears(), shared.fp8_linears(scale_format)
    return LayerClasses(
        norm=shared.SharedRMSNorm,
        residual_add=get_bias_dropout_add,
        attention=FlashAttention if flash_attention_3 else SharedAttention,
        linears=linears,
        fp8_linears=fp8,
        activation=shared.SharedSiluMul,
        moe_layer=SharedMoELayer,
    )


def transformer_engine_linears(scale_format: ScaleFormat | None) -> ModuleType:
    """Import and return the module `te_linears`.

    scale_format:  the format of the FP8 scales; None if no layer multiplies in FP8
    Raises:        UserError if Transformer Engine cannot be imported, or cannot multiply in FP8 with this format,
                   forward and backward
    """
    try:
        te_linears = importlib.import_module("nemo_fp8rl.policy.layers.te_linears")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"FP8 layers and experts on a GPU are Transformer Engine's, which cannot be imported ({error}): "
            "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]>=2.15,<2.21'"
        ) from None
    if scale_format is not None and (why_not := te_linears.why_no_fp8(scale_format)):
        other = "flow=fp8_rollout" if te_linears.why_no_fp8("pow2") else "scale_format=pow2"
        raise UserError(
            f"Transformer Engine has no blockwise FP8 of {scale_format} scales on this machine ({why_not}); "
            f"set nemo_fp8rl.{other}"
        )
    if scale_format is not None and (override := te_linears.backward_override()) is not None:
        raise UserError(
            f"NVTE_BACKWARD_OVERRIDE={override} takes Transformer Engine's backward out of FP8, in which "
            "nemo_fp8rl.flow=fp8_e2e trains: unset it, in the environment or in policy.megatron_cfg.env_vars"
        )
    return te_linears


def trainer_fingerprint(shapes: Shapes, device: torch.device) -> frozenset[tuple[str, str]]:
    """Return the digests of the operations that the trainer shares with engines (`ops.fingerprint`).

    On a GPU its FP8 product is Transformer Engine's. Raises UserError where there is none, or no FlashAttention 3 that
    the recipe chooses.
    """
    from nemo_fp8rl.ops.fingerprint import Functions, fingerprint
    from nemo_fp8rl.ops.flash_attention import attention_without_pages

    functions = Functions(attention=attention_without_pages if shapes.flash_attention_3 else None)
    if device.type == "cuda" and shapes.fp8_matrices:
        te = transformer_engine_linears("pow2" if shapes.pow2 else "fp32")
        functions = functions._replace(fp8_product=te.fp8_product, expert_product=te.fp8_product)
    return fingerprint(shapes, device, functions)


def block_spec(
    layout: Layout,
    choice: Fp8RlConfig,
    fp8_layers: Fp8Layers,
    rope: Rope,
    kv_cache: TrainerKvCache | None,
    flash_attention_3: bool,
) -> TransformerBlockSubmodules:
    """Return the spec of the rank's decoder layers for this precision and alignment."""
    scale_format = choice.scale_format
    classes = layer_classes(choose_alignment(choice), scale_format, flash_attention_3)
    attention = make_attention_class(classes.attention, rope, kv_cache)

    def linear(name: str, row: bool) -> type:
        in_fp8, is_grouped = fp8_layers.quantizes(name), layout.grouped_experts and ".experts." in name
        if not (torch.cuda.is_available() and (in_fp8 or is_grouped)):
            return (classes.fp8_linears if in_fp8 else classes.linears)[row]
        expert_format = scale_format if in_fp8 else None
        te = transformer_engine_linears(expert_format)
        fp8_param = in_fp8 and choice.fp8_param
        return (te.te_experts(expert_format, fp8_param) if is_grouped else te.te_linears(scale_format, fp8_param))[row]

    layers = [_layer_spec(layout, i, classes, attention, linear) for i in layout.layers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=classes.norm)


def _layer_spec(
    layout: Layout, layer: int, classes: LayerClasses, attention: type, linear: Callable[[str, bool], type]
) -> ModuleSpec:
    """Return the spec of one layer.

    linear:  (HF name, True if row-parallel) -> the class of a linear layer
    """
    hf = layout.hf
    self_attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    mlp += ".experts" if hf.family.experts else ""
    qkv = linear(f"{self_attn}.q_proj", False)
    linears = MLPSubmodules(
        linear_fc1=linear(f"{mlp}.gate_proj", False),
        linear_fc2=linear(f"{mlp}.down_proj", True),
        activation_func=classes.activation,
    )
    norm = classes.norm
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=make_qkv_by_kind(qkv) if layout.qkv_by_kind else qkv,
                    core_attention=attention,
                    linear_proj=linear(f"{self_attn}.o_proj", True),
                    q_layernorm=norm if hf.family.qk_norm else None,
                    k_layernorm=norm if hf.family.qk_norm else None,
                ),
            ),
            self_attn_bda=classes.residual_add,
            pre_mlp_layernorm=norm,
            mlp=_mlp_spec(hf, classes, linears, layout.grouped_experts),
            mlp_bda=classes.residual_add,
        ),
    )


def _mlp_spec(hf: HfConfig, classes: LayerClasses, linears: MLPSubmodules, grouped: bool) -> ModuleSpec:
    if not hf.family.experts:
        return ModuleSpec(module=MLP, submodules=linears)
    experts = ModuleSpec(module=TEGroupedMLP if grouped else classes.experts, submodules=linears)
    return ModuleSpec(module=classes.moe_layer, submodules=MoESubmodules(experts=experts))
