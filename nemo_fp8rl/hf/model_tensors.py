"""Every tensor of a model, by HF name: a checkpoint must contain them and a refit must transfer them."""

from nemo_fp8rl.hf.model_config import HfConfig

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def expected_tensors(hf: HfConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model, by HF name."""
    family = hf.family
    h, q, kv = hf.hidden_size, hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    biases = (("q", q), ("k", kv), ("v", kv))
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (hf.vocab_size, h)}
    for i in range(hf.num_hidden_layers):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": (h,),
            layer + "self_attn.q_proj.weight": (q, h),
            layer + "self_attn.k_proj.weight": (kv, h),
            layer + "self_attn.v_proj.weight": (kv, h),
            **({f"{layer}self_attn.{x}_proj.bias": (size,) for x, size in biases} if family.qkv_bias else {}),
            **({f"{layer}self_attn.{x}_norm.weight": (hf.head_dim,) for x in "qk"} if family.qk_norm else {}),
            layer + "self_attn.o_proj.weight": (h, q),
            layer + "post_attention_layernorm.weight": (h,),
            **({layer + "mlp.gate.weight": (hf.num_experts, h)} if family.experts else {}),
        }
        for mlp in mlp_prefixes(hf, layer):
            tensors |= {
                mlp + "gate_proj.weight": (hf.intermediate_size, h),
                mlp + "up_proj.weight": (hf.intermediate_size, h),
                mlp + "down_proj.weight": (h, hf.intermediate_size),
            }
    tensors[NORM] = (h,)
    if not hf.tie_word_embeddings:
        tensors[HEAD] = (hf.vocab_size, h)
    return tensors


def mlp_prefixes(hf: HfConfig, layer: str) -> list[str]:
    """Return the name prefixes of a layer's gated MLPs: of its single MLP, or of each expert."""
    return [f"{layer}mlp.experts.{e}." for e in range(hf.num_experts)] if hf.family.experts else [layer + "mlp."]
