"""Builds Megatron Core's GPTModel from an HF checkpoint folder."""

import logging
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.config.policy_schema import MegatronConfig, PolicyConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import FP8
from nemo_fp8rl.hf.adapters import is_adapter
from nemo_fp8rl.hf.fp8_layers import projections, trainer_fp8_layers
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.shared_operations import check_shared_operations, chooses_flash_attention_3, operation_shapes
from nemo_fp8rl.ops import flash_attention
from nemo_fp8rl.ops.alignment import choose_alignment
from nemo_fp8rl.policy.layer_specs import block_spec, product_mismatches, transformer_engine_linears
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.linears import Fp8MatmulLayer
from nemo_fp8rl.policy.layers.low_rank import AdapterState
from nemo_fp8rl.policy.layers.rope import read_rope
from nemo_fp8rl.policy.weights.adapters import init_adapters
from nemo_fp8rl.policy.weights.checkpoint import load_hf
from nemo_fp8rl.policy.weights.fp8_params import freeze
from nemo_fp8rl.policy.weights.hf_names import ROUTER
from nemo_fp8rl.policy.weights.layout import Layout, expert_tensor_size

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class PolicyModel(GPTModel):
    """A GPTModel that returns the output of its final norm, [B, T, H]; `logprobs` multiplies by the head, in chunks.

    In a pipeline only the last stage does so; other stages return Megatron's [T, B, H]. Under tensor parallelism every
    rank has all tokens at the end, and its part of the vocabulary.
    """

    layout: Layout
    adapters: AdapterState | None = None

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_states).transpose(0, 1)
        # its gradient must be contiguous: otherwise Megatron sums a copy and returns this rank's part unsummed
        return copy_to_tensor_model_parallel_region(hidden_states.transpose(0, 1).contiguous())

    @property
    def head(self) -> Tensor:
        """The head's rows of `layout.vocabulary`, [V, H]; only on the last stage."""
        tied = self.share_embeddings_and_output_weights and self.pre_process
        weight = self.embedding.word_embeddings.weight if tied else self.output_layer.weight
        return weight[: len(self.layout.vocabulary)]


def moe_dispatcher(parallel: MegatronConfig) -> Literal["alltoall", "allgather"]:
    """Return how tokens travel to their experts: "alltoall" where Megatron recommends it, else "allgather".

    Megatron recommends it where experts are split otherwise than the rest of the model. Only "alltoall" takes
    microbatches of different lengths, which occur in replicas that share experts (`Layout.experts_span_replicas`) and
    one after the other in a pipeline.
    """
    has_other_split = parallel.expert_tensor_parallel_size != parallel.tensor_model_parallel_size
    uneven = has_other_split or parallel.expert_model_parallel_size > 1 or parallel.pipeline_model_parallel_size > 1
    return "alltoall" if uneven else "allgather"


def skip_init(weight: Tensor) -> None:
    """Leave a weight uninitialized: Megatron's `init_method` for weights that `load_hf` sets.

    `load_hf` sets every weight or raises, and random numbers on the host took longer than reading the checkpoint.
    (perform_initialization=False would also leave out the weights' attributes, such as `tensor_model_parallel`, which
    the gradient norm reads.)
    """


def transformer_config(hf: HfConfig, policy: PolicyConfig, choice: Fp8RlConfig) -> TransformerConfig:
    """Describe the architecture to Megatron: without fusions, weights made on the CPU, gradients summed."""
    dtype, parallel = DTYPES[policy.precision], policy.megatron_cfg
    alignment = choose_alignment(choice)
    residual = torch.float32 if alignment == "vllm_cpu" else dtype
    pipelined = parallel.pipeline_model_parallel_size > 1
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=hf.family.qk_norm,
        add_qkv_bias=hf.family.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_size(hf, parallel),
        context_parallel_size=parallel.context_parallel_size,
        num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
        sequence_parallel=parallel.sequence_parallel,
        moe_token_dispatcher_type=moe_dispatcher(parallel),
        variable_seq_lengths=pipelined,  # stages send each other the shape of each microbatch
        batch_p2p_comm=False,
        batch_p2p_sync=False,
        params_dtype=dtype,
        pipeline_dtype=residual,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        fp32_residual_connection=residual is torch.float32,
        calculate_per_token_loss=True,  # data-parallel gradients are summed; the loss divides by the global count
        use_cpu_initialization=True,
        init_method=skip_init,  # also of the embedding
        output_layer_init_method=skip_init,
        bias_activation_fusion=False,
        use_te_activation_func=alignment == "shared_ops",  # Megatron's slot for any activation class (`layer_specs`)
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        disable_parameter_transpose_cache=True,  # else Transformer Engine reuses the FP8 weights of the first step
        **(RECOMPUTE if parallel.activation_checkpointing else {}),
        **(_moe_options(hf, choice) if hf.family.experts else {}),
    )


def _moe_options(hf: HfConfig, choice: Fp8RlConfig) -> dict[str, Any]:
    """Return Qwen3-MoE's routing: top-k of the softmax, renormalized.

    There is no balancing loss, because it would be another objective.
    """
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": False,  # softmax of the selected logits: HF's norm_topk_prob=true
        # None: the activations' dtype, as in vLLM on a CPU
        "moe_router_dtype": None if choose_alignment(choice) == "vllm_cpu" else "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": torch.cuda.is_available(),  # one layer of Transformer Engine has all experts of a rank
        "moe_permute_fusion": torch.cuda.is_available(),  # Transformer Engine's; Megatron's has no fixed order
    }


def build_model(config: TransformerConfig, layout: Layout, cfg: Config, kv_cache: TrainerKvCache | None) -> PolicyModel:
    """Build this rank's part of the checkpoint at policy.model_name.

    Raises RuntimeError if the model lacks an FP8 layer that the flow requires.
    """
    hf, policy, choice, fp8_layers = layout.hf, cfg.policy, cfg.nemo_fp8rl, trainer_fp8_layers(layout.hf, cfg)
    mismatches: list[str] = []
    if torch.cuda.is_available() and choose_alignment(choice) == "shared_ops" and choice.quantizes_training:
        mismatches = product_mismatches(operation_shapes(hf, cfg), torch.empty(0, device="cuda").device)
    checkpoint = checkpoint_folder(policy.model_name, weights=True)
    rope = read_rope(checkpoint, hf)
    adapters = AdapterState.of(policy.megatron_cfg.peft) if layout.adapters else None
    # Megatron warns about every layer class that is not its own
    logging.getLogger(transformer_layer.__name__).setLevel(logging.ERROR)
    layers = block_spec(
        layout,
        choice,
        fp8_layers,
        rope,
        kv_cache,
        mismatches,
        flash_attention_3=chooses_flash_attention_3(cfg),
        adapters=adapters,
        kv_window=cfg.trainer_kv_window,
    )
    model = PolicyModel(
        config,
        layers,
        vocab_size=layout.padded_vocab_size,
        max_sequence_length=policy.max_total_sequence_length,
        pre_process=layout.is_first_stage,
        post_process=layout.is_last_stage,
        position_embedding_type="none",  # the attention applies RoPE
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    )
    model.layout, model.adapters = layout, adapters
    fp8_linears = sum(isinstance(module, Fp8MatmulLayer) for module in model.modules())
    names = [name for name in projections(hf, fp8_layers) if int(name.split(".")[2]) in layout.layers]
    expert_layers = 1 if layout.grouped_experts else len(layout.experts)
    expected = sum(expert_layers if ".experts." in name else 1 for name in names)
    if fp8_linears != expected:  # a defect of this code: `layer_specs` chose the layers and checked the recipe
        raise RuntimeError(f"flow {choice.flow} asks for {expected} FP8 linear layers, the model has {fp8_linears}")
    mark_experts(model, layout)
    load_hf(checkpoint, model, layout)
    if adapters is not None:
        init_adapters(model, layout, policy.megatron_cfg.peft, cfg.grpo.seed)
        for name, parameter in model.named_parameters():
            if not is_adapter(name):
                freeze(parameter)
        if layout.is_first_stage and policy.megatron_cfg.activation_checkpointing:
            model.embedding.register_forward_hook(_require_gradient)
    elif policy.megatron_cfg.freeze_moe_router:
        for name, parameter in model.named_parameters():
            if name.endswith(tuple(ROUTER)):
                parameter.requires_grad = False
    return model


def _require_gradient(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Let the output of a frozen embedding have a gradient: torch computes a layer again only for inputs with one."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def check_gpu_policy(cfg: Config, hf: HfConfig) -> None:
    """Raise UserError, before anything is built, if the recipe asks for what a policy on a GPU cannot do."""
    if choose_alignment(cfg.nemo_fp8rl) == "shared_ops":
        check_shared_operations(hf, cfg)
        if chooses_flash_attention_3(cfg):
            flash_attention.check_machine()
    choice = cfg.nemo_fp8rl
    trains_in_fp8 = choice.quantizes_training and choice.format is FP8
    if trains_in_fp8 and (backward := choice.resolved_backward) != "native":
        raise UserError(
            f"nemo_fp8rl.backward={backward}: Transformer Engine's layers, which multiply in FP8 on a GPU, have the "
            "native backward; set it to auto"
        )
    if hf.family.experts or trains_in_fp8:
        te = transformer_engine_linears(choice.scale_format if trains_in_fp8 else None)
        allgather = hf.family.experts and moe_dispatcher(cfg.policy.megatron_cfg) == "allgather"
        if allgather and (why_not := te.why_no_allgather()):
            raise UserError(
                f"{why_not} where experts are on one rank: install 2.15 or later, or set "
                "policy.megatron_cfg.expert_model_parallel_size=2 or more"
            )
    if hf.family.experts and cfg.policy.precision == "float32":
        raise UserError(
            "policy.precision=float32: on a GPU experts are Transformer Engine's, which multiplies float32 in TF32; "
            "set policy.precision=bfloat16"
        )


def mark_experts(model: PolicyModel, layout: Layout) -> None:
    """Set the attributes of experts' weights by which Megatron sums their gradients and counts them in the norm.

    `allreduce` selects the ranks that sum the gradients. Megatron Core 0.16 sets it where experts are spread over
    ranks, but not where experts are split otherwise than the rest of the model. `tensor_model_parallel` makes every
    rank's part count in the gradient norm; 0.16 does not set it for Transformer Engine's experts. 0.19 sets both
    (NVIDIA/Megatron-LM pull request 5916).
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.tensor_model_parallel = True  # an expert with an adapter is whole on its rank
            if layout.expert_tensor.size != layout.tensor.size:
                parameter.allreduce = False  # sum over `expert_data` and not over `data`
