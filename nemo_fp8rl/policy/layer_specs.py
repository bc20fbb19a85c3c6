"""Layer specs: the classes from which Megatron Core builds a transformer layer.

A spec combines two choices. Precision: `ColumnParallelLinear` or its FP8 sibling. Alignment: Megatron's own norm,
residual and attention, or those of `aligned_layers`. Nothing in Megatron is patched; a spec is its public way to
replace a class.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from nemo_fp8rl.fp8 import FP8, Fp8Layers, LinearRecipe, ScaleFormat
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.shared_operations import Shapes
from nemo_fp8rl.ops.alignment import Alignment, choose_alignment
from nemo_fp8rl.policy.layers.aligned_experts import AlignedExperts, AlignedMoELayer
from nemo_fp8rl.policy.layers.aligned_layers import AlignedAttention, AlignedRMSNorm, aligned_residual_add, norm_weight
from nemo_fp8rl.policy.layers.attention import CoreAttention, SdpaAttention, make_attention_class
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.linears import bf16_linears, make_qkv_by_kind, quantized_linears
from nemo_fp8rl.policy.layers.low_rank import AdapterState, with_adapter, with_expert_adapters
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
    with_shared_values:  (Transformer Engine's layers of experts, format of FP8 scales or None) -> the same with the
                         engine's values; for weights in bfloat16, and for FP8 where Transformer Engine has other bits
    with_adapter:        (linear layer, True if row-parallel, adapters) -> the layer with an adapter
    with_expert_adapters: the same of a layer that holds all experts of a rank
    """

    norm: type
    residual_add: Callable[..., Any]
    attention: type[CoreAttention]
    linears: tuple[type, type]
    fp8_linears: tuple[type, type]
    activation: type | None = None
    experts: type = SequentialMLP
    moe_layer: type = MoELayer
    with_shared_values: Callable[[tuple[type, type], ScaleFormat | None], tuple[type, type]] = lambda layers, _: layers
    with_adapter: Callable[[type, bool, AdapterState], type] = with_adapter
    with_expert_adapters: Callable[[type, bool, AdapterState], type] = with_expert_adapters


def layer_classes(
    alignment: Alignment,
    recipe: LinearRecipe,
    mismatches: Sequence[str] = (),
    flash_attention_3: bool = False,
) -> LayerClasses:
    """Return the layers that round as this alignment says; `block_spec` has the arguments."""
    if alignment == "none":
        linears, fp8 = bf16_linears(False), quantized_linears(recipe, False)
        return LayerClasses(RMSNorm, get_bias_dropout_add, SdpaAttention, linears, fp8)
    if alignment == "vllm_cpu":
        linears, fp8 = bf16_linears(True), quantized_linears(recipe, True)
        return LayerClasses(
            norm=AlignedRMSNorm,
            residual_add=aligned_residual_add,
            attention=AlignedAttention,
            linears=linears,
            fp8_linears=fp8,
            experts=AlignedExperts,
            moe_layer=AlignedMoELayer,
        )
    from nemo_fp8rl.policy.layers.shared_ops import dense_layers as shared
    from nemo_fp8rl.policy.layers.shared_ops import low_rank
    from nemo_fp8rl.policy.layers.shared_ops.attention import FlashAttention, SharedAttention
    from nemo_fp8rl.policy.layers.shared_ops.experts import SharedMoELayer
    from nemo_fp8rl.policy.layers.shared_ops.grouped_experts import shared_values

    linears, fp8 = shared.linears(), shared.fp8_linears(recipe.scale_format, tuple(mismatches))
    return LayerClasses(
        norm=shared.SharedRMSNorm,
        residual_add=get_bias_dropout_add,
        attention=FlashAttention if flash_attention_3 else SharedAttention,
        linears=linears,
        fp8_linears=fp8,
        activation=shared.SharedSiluMul,
        moe_layer=SharedMoELayer,
        with_shared_values=partial(shared_values, mismatches=tuple(mismatches)),
        with_adapter=low_rank.with_adapter,
        with_expert_adapters=low_rank.with_expert_adapters,
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

    On a GPU its FP8 products are Transformer Engine's where `product_mismatches` is empty. Raises UserError where
    there is no Transformer Engine, or no FlashAttention 3 that the recipe chooses.
    """
    from nemo_fp8rl.ops.fingerprint import Functions, fingerprint
    from nemo_fp8rl.ops.flash_attention import attention_without_pages

    functions = Functions(attention=attention_without_pages if shapes.flash_attention_3 else None)
    if torch.cuda.is_available() and shapes.fp8_matrices and not product_mismatches(shapes, device):
        te = transformer_engine_linears("pow2" if shapes.pow2 else "fp32")
        functions = functions._replace(fp8_product=te.fp8_product, expert_product=te.fp8_expert_product)
    return fingerprint(shapes, device, functions)


def product_mismatches(shapes: Shapes, device: torch.device) -> list[str]:
    """Return the FP8 matrices in which Transformer Engine has other bits than the shared product, on any rank.

    If there is one, the trainer multiplies by the shared product, as an engine does whose library has other bits.
    Raises UserError where there is no Transformer Engine.
    """
    from nemo_fp8rl.ops.fingerprint import Functions, is_shared_product

    te = transformer_engine_linears("pow2" if shapes.pow2 else "fp32")
    functions, names = Functions(te.fp8_product, te.fp8_expert_product), shapes.fp8_matrices
    mismatches = [
        not is_shared_product(functions.of_matrix(name, shapes), shapes.matrices[name], shapes.pow2, device)
        for name in names
    ]
    of_all_ranks = torch.tensor(mismatches, dtype=torch.int32, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(of_all_ranks)
    return [name for name, ranks in zip(names, of_all_ranks.tolist(), strict=True) if ranks]


def linear_recipe(choice: Fp8RlConfig) -> LinearRecipe:
    """Return how the trainer's quantized layers multiply."""
    fp4 = choice.fp4
    is_native_fp4 = choice.format.is_fp4 and choice.resolved_backward == "native"
    return LinearRecipe(
        choice.format,
        choice.scale_format,
        choice.resolved_backward,
        hadamard=fp4.hadamard and is_native_fp4,
        stochastic_rounding=fp4.stochastic_rounding and is_native_fp4,
        estimator=fp4.estimator,
        clamp_quantile=fp4.clamp_quantile,
    )


def block_spec(
    layout: Layout,
    choice: Fp8RlConfig,
    fp8_layers: Fp8Layers,
    rope: Rope,
    kv_cache: TrainerKvCache | None,
    mismatches: Sequence[str] = (),
    flash_attention_3: bool = False,
    adapters: AdapterState | None = None,
    kv_window: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the spec of the rank's decoder layers for this precision and alignment.

    mismatches:             `product_mismatches`; if there is one, no layer is Transformer Engine's alone, and the
                        kernels' names say why
    flash_attention_3:  with shared operations, take attention from FlashAttention 3
    adapters:           of the modules that the layout says to have one
    kv_window:          see `CoreAttention`
    Raises:             UserError where only Transformer Engine has a layer that the recipe asks for
    """
    scale_format = choice.scale_format
    alignment = choose_alignment(choice)
    recipe = linear_recipe(choice)
    classes = layer_classes(alignment, recipe, mismatches, flash_attention_3)
    rank_order = alignment == "shared_ops"
    has_te = torch.cuda.is_available() and choice.format is FP8  # other formats are emulated, on a GPU as well
    fp8_param = choice.fp8_param or (adapters is not None and not mismatches)  # a frozen base has no other values
    attention = make_attention_class(classes.attention, rope, kv_cache, kv_window)
    if mismatches and choice.fp8_param:
        raise UserError(
            f"nemo_fp8rl.fp8_param: under nemo_fp8rl.align=vllm Transformer Engine's product has other bits than the "
            f"engine's on this GPU in {', '.join(mismatches)}, and no other layer holds FP8 weights; set "
            "nemo_fp8rl.fp8_param=false or nemo_fp8rl.align=none"
        )

    def linear(name: str, row: bool) -> type:
        module = base_linear(name, row)
        if adapters is None or not layout.adapters.adapts(name):
            return module
        is_grouped = layout.grouped_experts and ".experts." in name
        return (classes.with_expert_adapters if is_grouped else classes.with_adapter)(module, row, adapters)

    def base_linear(name: str, row: bool) -> type:
        in_fp8 = fp8_layers.quantizes(name)
        if layout.grouped_experts and ".experts." in name:
            return grouped(in_fp8)[row]
        if mismatches or not (has_te and in_fp8):
            return (classes.fp8_linears if in_fp8 else classes.linears)[row]
        return transformer_engine_linears(scale_format).te_linears(scale_format, fp8_param, rank_order)[row]

    def grouped(in_fp8: bool) -> tuple[type, type]:
        expert_format = scale_format if in_fp8 else None
        te = transformer_engine_linears(expert_format)
        layers = te.te_experts(expert_format, in_fp8 and fp8_param)
        return classes.with_shared_values(layers, expert_format) if mismatches or not in_fp8 else layers

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
