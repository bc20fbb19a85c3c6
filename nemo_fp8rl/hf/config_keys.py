"""The keys of config.json: those that are read here, those that change nothing, and those that only vLLM goes by.

vLLM and transformers make every key of config.json an attribute, and vLLM asks for many that the files of these
families do not have: with `logit_scale` or `rotary_pct` an engine computes another model than the trainer. Such a key
is refused unless its value changes nothing. The lists follow the source of vLLM 0.32 (the models of the families,
rotary_embedding, transformers_utils, config/model.py, model_arch_config_convertor.py) and of transformers 5;
tests/hf/test_config_keys.py finds keys that a new version asks for. A key that is in no list is named in a warning.
"""

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import short_repr

READ = {
    *("architectures", "attention_bias", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size"),
    *("layer_types", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "original_max_position_embeddings", "partial_rotary_factor", "quantization_config"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "use_sliding_window"),
    *("vocab_size",),
}
"""Keys that `model_config` reads or refuses."""
READ_OF_EXPERTS = {
    *("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts"),
    *("num_experts_per_tok", "num_local_experts"),
}
WITHOUT_EFFECT = {
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_experts_implementation"),
    *("_flash_attn_2_enabled", "_name_or_path", "attention_dropout", "auto_map", "bos_token_id"),
    *("chunk_size_feed_forward", "decoder_start_token_id", "dtype", "finetuning_task", "hidden_dropout", "id2label"),
    *("initializer_range", "is_decoder", "label2id", "max_window_layers", "name_or_path", "num_labels"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "prefix", "pretraining_tp"),
    *("problem_type", "return_dict", "router_aux_loss_coef", "sep_token_id", "task_specific_params"),
    *("tf_legacy_loss", "tie_encoder_decoder", "tie_last_hidden_states", "tokenizer_class", "torch_dtype"),
    *("torchscript", "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16"),
    *("use_cache", "vllm_version"),
    # how HF samples, which config.json of older transformers held
    *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
    *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "min_p"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores"),
    *("remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature"),
    *("top_k", "top_p", "typical_p"),
}
"""Keys that change no number of trainer or engine."""

OFF, NONE, ZERO, ONE = (None, False), (None,), (None, False, 0), (1,)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # logits
    "logit_scale": ONE, "logits_scaling": ONE, "final_logit_softcapping": ZERO, "logits_soft_cap": ZERO,
    "output_multiplier_scale": ONE, "mup_enabled": OFF, "head_dtype": (None, "model"),
    # embedding, residual and norms
    "embedding_multiplier": ONE, "residual_multiplier": ONE, "scale_emb": ONE, "scale_depth": ONE,
    "dim_model_base": NONE, "embedding_size": NONE, "norm_type": (None, "rmsnorm", "rms_norm"),
    "parallel_residual": OFF, "use_parallel_residual": OFF,
    # attention
    "is_causal": (True,), "use_bidirectional_attention": OFF, "is_mm_prefix_lm": OFF, "attention_multiplier": NONE,
    "attn_logit_softcapping": ZERO, "attention_chunk_size": NONE, "attn_config": NONE, "attn_type_list": NONE,
    "dual_chunk_attention_config": NONE, "sliding_window_pattern": NONE, "rswa_window": NONE, "alibi": OFF,
    "position_embedding_type": (None, "rope", "rotary"), "position_encoding_type": (None, "rope", "rotary"),
    "qk_norm": OFF, "use_qk_norm": OFF, "qk_layernorm": OFF, "clip_qkv": NONE, "qkv_bias": OFF, "bias": OFF,
    "attention_out_bias": OFF, "attention_sinks": OFF, "no_rope_layers": NONE, "no_rope_layer_interval": NONE,
    "hidden_size_per_head": NONE, "head_size": NONE, "n_head_kv": NONE, "num_kv_heads": NONE,
    "multi_query_group_num": NONE, "num_attention_groups": NONE, "multi_query": OFF, "kv_n_heads": NONE,
    "new_decoder_architecture": OFF, "kv_lora_rank": NONE, "q_lora_rank": NONE, "qk_rope_head_dim": NONE,
    "qk_nope_head_dim": NONE, "v_head_dim": NONE, "compress_ratios": NONE, "index_topk": NONE, "index_kpool": NONE,
    # positions
    "rotary_pct": ONE, "rotary_emb_fraction": ONE, "rotary_emb_base": (), "rope_dim": NONE, "rotary_dim": NONE,
    "mrope_section": NONE, "xdrope_section": NONE, "mrope_interleaved": OFF, "use_mrope": OFF, "use_fope": OFF,
    "rope_interleaved": OFF, "rotary_emb_interleaved": OFF, "is_neox_style": (True,),
    # layers
    "block_configs": NONE, "layers_block_type": NONE, "per_layer_config": (None, {}), "is_heterogeneous": OFF,
    "num_nextn_predict_layers": ZERO, "mtp_num_hidden_layers": ZERO, "num_layers": NONE, "hc_count": NONE,
    "engram_layer_ids": NONE, "ple_layer_ids": NONE, "target_layer_count": (), "draft_vocab_size": NONE,
    "num_experts_per_token": ZERO, "top_k_experts": ZERO, "moe_topk": ZERO, "moe_top_k": ZERO, "moe_num_experts": ZERO,
    "n_routed_experts": ZERO, "n_shared_experts": ZERO, "num_shared_experts": ZERO, "first_k_dense_replace": ZERO,
    "shared_expert_intermediate_size": ZERO, "routed_scaling_factor": (None, 1), "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"), "n_group": (None, 0, 1), "topk_group": (None, 0, 1), "swiglu_limit": NONE,
    "use_grouped_topk": OFF, "canvas_length": NONE,
    # another kind of model
    "is_encoder_decoder": OFF, "cross_attention_hidden_size": NONE, "add_cross_attention": OFF, "text_config": NONE,
    "llm_config": NONE, "language_config": NONE, "thinker_config": NONE, "vision_config": NONE, "audio_config": NONE,
    "encoder_config": NONE, "encoder": NONE, "decoder": NONE, "generator": NONE, "text_encoder": NONE,
    "sub_configs": (None, {}), "pruned_heads": (None, {}), "speculators_config": NONE, "eagle_config": NONE,
    "eagle_aux_hidden_state_layer_ids": NONE, "dflash_config": NONE, "compression_config": NONE,
    "classifier_from_token": NONE, "is_original_qwen3_reranker": OFF, "is_matryoshka": OFF,
    "matryoshka_dimensions": NONE, "use_sep_token": NONE, "use_pad_token": NONE, "method": NONE,
    "projection_size": NONE, "projection_dim": NONE, "model": NONE, "max_source_positions": NONE,
    "mm_prefix_clamp_sliding_window": OFF, "mm_prefix_span_leading_pad_modulus": ZERO, "mamba_chunk_size": NONE,
    "chunk_size": NONE,
}  # fmt: skip
"""Keys by which vLLM goes, or of architectures that neither side builds, with the values that change nothing."""
NEUTRAL_OF_LLAMA: dict[str, tuple[Any, ...]] = {"sliding_window": NONE}
"""The other families have `use_sliding_window`; vLLM gives a Llama with `sliding_window` that window at once."""
LENGTHS = (
    *("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions", "max_sequence_length"),
    *("max_seq_length", "seq_len", "max_trained_positions", "original_max_model_len"),
)
"""Other names of max_position_embeddings: vLLM takes the smallest."""


def check_config_keys(raw: Mapping[str, Any], path: Path, architecture: str, has_experts: bool) -> None:
    """Raise UserError for a key that would make vLLM compute another model than the trainer; warn of unknown keys.

    path:          of config.json
    architecture:  the class of the family, as HF names it
    """
    if (raw.get("architectures") or [architecture]) != [architecture]:
        raise UserError(
            f"{path}: architectures={short_repr(raw['architectures'])} is not supported: of model_type "
            f"{raw['model_type']!r} only {architecture} is, and vLLM would build what is named"
        )
    neutral, known = dict(NEUTRAL), READ | WITHOUT_EFFECT | (READ_OF_EXPERTS if has_experts else set())
    if raw["model_type"] == "llama":
        neutral |= NEUTRAL_OF_LLAMA
    else:
        known |= {"sliding_window"}
    for key, value in raw.items():
        if key in neutral and not any(_is_same(value, allowed) for allowed in neutral[key]):
            raise UserError(
                f"{path}: {key}={short_repr(value)} is not supported: it changes the model, and vLLM may go by it "
                f"where the trainer does not; {_allowed(neutral[key])}"
            )
        longest = raw.get("max_position_embeddings")
        if (
            key in LENGTHS
            and value is not None
            and not (_is_number(value) and _is_number(longest) and value >= longest)
        ):
            raise UserError(
                f"{path}: {key}={short_repr(value)} is below max_position_embeddings={longest}, and vLLM would go by "
                "it; write it as max_position_embeddings, and remove it"
            )
    unknown = [key for key, value in raw.items() if key not in {*known, *neutral, *LENGTHS} and _is_set(value)]
    if unknown:
        _warn(str(path), ", ".join(sorted(unknown)))


def _allowed(values: tuple[Any, ...]) -> str:
    neutral = " or ".join(json.dumps(value) for value in values if value is not None)
    return (
        f"remove it, or set it to {neutral}, if the weights are of a model without it"
        if neutral
        else ("remove it if the weights are of a model without it")
    )


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(value: Any, allowed: Any) -> bool:
    """Return whether two values of JSON are the same; 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


@cache
def _warn(path: str, keys: str) -> None:
    """Warn once in a process."""
    logging.getLogger(__name__).warning(
        "%s sets keys that nothing here reads: %s. If one of them changes the model, trainer and engine may differ.",
        path,
        keys,
    )
