"""A Megatron Core GPTModel from an HF checkpoint folder."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.config import Config, Fp8RlConfig, PolicyConfig
from nemo_fp8rl.hf.config import HfConfig, trainer_fp8_layers
from nemo_fp8rl.policy.linears import Fp8Forward
from nemo_fp8rl.policy.rope import inverse_frequencies
from nemo_fp8rl.policy.specs import block_spec
from nemo_fp8rl.policy.state import load_hf

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class PolicyModel(GPTModel):
    """GPTModel that ends at the final norm, [B, T, H]; `logprobs` multiplies by the head, a chunk at a time."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states.transpose(0, 1)

    @property
    def head(self) -> Tensor:
        """[V, H]"""
        tied = self.share_embeddings_and_output_weights
        return self.embedding.word_embeddings.weight if tied else self.output_layer.weight


def transformer_config(hf: HfConfig, policy: PolicyConfig, choice: Fp8RlConfig) -> TransformerConfig:
    """Megatron's description of the architecture: fusions off, weights initialized on CPU, gradients summed."""
    dtype = DTYPES[policy.precision]
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp32_residual_connection=choice.align == "vllm",
        calculate_per_token_loss=True,  # data-parallel gradients are summed; the loss divides by the global count
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **(RECOMPUTE if policy.megatron_cfg.activation_checkpointing else {}),
        **(_mixture(hf, choice) if hf.family.experts else {}),
    )


def _mixture(hf: HfConfig, choice: Fp8RlConfig) -> dict[str, Any]:
    """Qwen3-MoE's routing: top-k of the softmax, renormalized; no balancing loss, which would be another objective."""
    return {
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_pre_softmax": False,  # softmax of the chosen logits: HF's norm_topk_prob=true
        "moe_router_dtype": None if choice.align == "vllm" else "fp32",  # None: the activations', as vLLM's on CPU
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }


def build_model(config: TransformerConfig, hf: HfConfig, cfg: Config) -> PolicyModel:
    """The model of the checkpoint at policy.model_name, weights loaded; refuses to start without its FP8 layers."""
    policy, choice, fp8_layers = cfg.policy, cfg.nemo_fp8rl, trainer_fp8_layers(hf, cfg)
    inv_freq = inverse_frequencies(policy.model_name, hf)
    model = PolicyModel(
        config,
        block_spec(hf, choice, fp8_layers, inv_freq),
        vocab_size=hf.vocab_size,
        max_sequence_length=policy.max_total_sequence_length,
        position_embedding_type="none" if choice.align == "vllm" else "rope",  # align: the attention applies RoPE
        rotary_base=int(hf.rope_theta),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        parallel_output=False,
    )
    if choice.align == "none":
        model.rotary_pos_emb.inv_freq = inv_freq  # Megatron's own has only some of the scalings
    fp8_linears = sum(isinstance(module, Fp8Forward) for module in model.modules())
    expected = (2 + 2 * max(1, hf.num_experts)) * fp8_layers.count  # qkv, proj and each MLP's fc1, fc2
    if fp8_linears != expected:
        raise RuntimeError(f"flow {choice.flow} asks for {expected} FP8 linear layers, the model has {fp8_linears}")
    load_hf(Path(policy.model_name), model, hf)
    return model
