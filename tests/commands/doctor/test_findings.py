"""What is said of alignment, batches, precision and hardware, and of nothing else than what was changed."""

import json
import math
import re

import pytest

from nemo_fp8rl.commands.doctor.alignment.block_alignment import check_alignment
from nemo_fp8rl.commands.doctor.batch_sizes import check_batches
from nemo_fp8rl.commands.doctor.examine import check_learning_rate
from nemo_fp8rl.commands.doctor.hardware import GPUS, check_hardware, gpu_by_name
from nemo_fp8rl.commands.doctor.known_models import KNOWN_MODELS
from nemo_fp8rl.commands.doctor.memory.adapter_memory import check_adapters
from nemo_fp8rl.commands.doctor.precision_agreement import check_agreement
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.adapters import adapter_tensors, read_adapters
from nemo_fp8rl.hf.model_config import read_hf_config
from tests.commands.doctor.conftest import A16, ENGINE, MXFP8, NVFP4, TRAINER

LLAMA, MIXTURE, LATENT = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "moonshotai/Moonlight-16B-A3B"
SMALL = "Qwen/Qwen2.5-1.5B"
SPREAD_HEADS = {"num_attention_heads": 36, "num_key_value_heads": 4, "intermediate_size": 13824, "head_dim": 128}
OURS = {"nemo_fp8rl.workers": "ours"}
SPREAD = {
    TRAINER + "tensor_model_parallel_size": 4,
    TRAINER + "expert_model_parallel_size": 8,
    TRAINER + "sequence_parallel": True,
    "policy.make_sequence_length_divisible_by": 4,
}


def said(findings, level: str) -> list[str]:
    return [finding.text for finding in findings if finding.level == level]


def one(findings, level: str) -> str:
    texts = said(findings, level)
    assert len(texts) == 1, texts
    return texts[0]


@pytest.mark.parametrize("check", [check_agreement, check_alignment, check_batches])
def test_a_sound_recipe_has_no_complaints(plan, check):
    for model, changes in ((LLAMA, {}), (MIXTURE, SPREAD), (LLAMA, {ENGINE + "kv_cache_dtype": "fp8"})):
        findings = list(check(plan(model, changes)))
        assert findings
        assert {finding.level for finding in findings} == {"ok"}


# Alignment


def test_experts_split_in_four_are_named_with_the_sizes_that_fit(plan):
    engine = said(check_alignment(plan(MIXTURE, {ENGINE + "tensor_parallel_size": 4})), "error")
    assert [text.split(" of ")[1].split("=")[0] for text in engine] == [
        "mlp.experts.*.gate_proj",
        "mlp.experts.*.up_proj",
        "mlp.experts.*.down_proj",
    ]
    assert "policy.generation.vllm_cfg.tensor_parallel_size=4 does not divide the model's rows" in engine[0]
    assert "sizes that fit: 1, 2, 3, 6" in engine[0]
    assert "(768 / 4 = 192)" in engine[0]
    trainer = said(check_alignment(plan(MIXTURE, SPREAD | {TRAINER + "expert_tensor_parallel_size": 4})), "error")
    assert "policy.megatron_cfg.expert_tensor_parallel_size=4" in trainer[0]


def test_experts_that_are_spread_are_whole(plan):
    spread = {ENGINE + "tensor_parallel_size": 4, ENGINE + "expert_parallel_size": 8}
    assert said(check_alignment(plan(MIXTURE, spread)), "error") == []


def test_what_is_bfloat16_need_not_be_aligned(plan):
    words = {ENGINE + "tensor_parallel_size": 4, ENGINE + "quantization_ignored_layer_kws": ["experts"]}
    assert said(check_alignment(plan(MIXTURE, words)), "error") == []
    assert list(check_alignment(plan(MIXTURE, {ENGINE + "precision": "bfloat16"}))) == []


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            LLAMA,
            {TRAINER + "tensor_model_parallel_size": 3},
            "trainer: policy.megatron_cfg.tensor_model_parallel_size=3 does not divide the model's "
            "num_attention_heads=32 of self_attn.q_proj; sizes that fit: 1, 2, 4, 8, 16, 32",
        ),
        (
            SMALL,
            {ENGINE + "tensor_parallel_size": 8},
            "engine: policy.generation.vllm_cfg.tensor_parallel_size=8 does not divide the model's "
            "num_attention_heads=12 of self_attn.q_proj; sizes that fit: 1, 2, 4",
        ),
        (SMALL, {TRAINER + "tensor_model_parallel_size": 3}, "=3 does not divide the model's intermediate_size=8960"),
        (SPREAD_HEADS, {ENGINE + "tensor_parallel_size": 6}, "neither divides the model's num_key_value_heads=4 of"),
        (MIXTURE, SPREAD | {TRAINER + "expert_tensor_parallel_size": 5}, "=5 does not divide the model's moe_inter"),
        (LATENT, {ENGINE + "tensor_parallel_size": 3}, "=3 does not divide the model's num_attention_heads=16"),
    ],
)
def test_what_ranks_cannot_share_is_named_in_any_precision(plan, tmp_path, precision, model, changes, message):
    if model is SPREAD_HEADS:
        (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["meta-llama/Llama-3.1-8B"] | SPREAD_HEADS))
        model = str(tmp_path)
    made = plan(model, changes | {ENGINE + "precision": precision})
    assert message in said(check_alignment(made), "error")[0]
    assert not any(message in text for text in said(check_alignment(plan(model, changes | OURS)), "error"))


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_key_heads_are_repeated_where_ranks_are_a_multiple_of_them(plan, precision):
    """On either side: 4 of them on 16 ranks."""
    words = {ENGINE + "quantization_ignored_layer_kws": ["experts"], ENGINE + "precision": precision}
    wide = SPREAD | {TRAINER + "tensor_model_parallel_size": 16, ENGINE + "tensor_parallel_size": 16}
    errors = said(check_alignment(plan(MIXTURE, wide | words)), "error")
    assert not any("num_" in text for text in errors)


def test_heads_smaller_than_a_block_are_other_blocks_in_nemo_rls_trainer(plan, tmp_path):
    """As Llama-3.2-1B's. It takes every linear layer to FP8, whatever stays in bfloat16 in the engine."""
    sizes = KNOWN_MODELS["meta-llama/Llama-3.1-8B"] | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    theirs, ours = ({"nemo_fp8rl.workers": workers} for workers in ("nemo_rl", "ours"))
    for words in ({}, {ENGINE + "quantization_ignored_layer_kws": ["q_proj"]}):
        assert "heads of 64 rows" in one(check_alignment(plan(str(tmp_path), theirs | words)), "warn")
        assert [finding.level for finding in check_alignment(plan(str(tmp_path), ours | words))] == ["ok"]
    assert list(check_alignment(plan(str(tmp_path), {ENGINE + "precision": "bfloat16"}))) == []


def test_megatron_divides_queries_keys_and_values_as_one_matrix_where_ranks_are_more_than_key_heads(plan):
    """40 rows of heads on 8 ranks are five blocks each; on 16 they end within a block."""
    for ranks, errors in ((8, 0), (16, 1)):
        wide = SPREAD | {TRAINER + "tensor_model_parallel_size": ranks}
        found = said(check_alignment(plan(MIXTURE, wide)), "error")
        assert len(found) == errors and all("rows of self_attn.linear_qkv=5120" in text for text in found)


def test_repeated_heads_are_not_split(plan):
    words = {ENGINE + "tensor_parallel_size": 8, ENGINE + "quantization_ignored_layer_kws": ["experts"]}
    assert said(check_alignment(plan(MIXTURE, words)), "error") == []  # 4 key heads on 8 ranks


def test_ragged_blocks_are_a_warning(plan):
    texts = said(check_alignment(plan(LATENT)), "warn")
    assert texts
    assert all("kv_a_proj_with_mqa has 576 rows" in text for text in texts)


def test_smaller_blocks_let_more_ranks_share_experts(plan):
    """768 / 4 = 192 = 6 x 32 = 12 x 16; with eight ranks 96 is whole in all, with sixteen 48 is no tile of 32."""
    for changes, block in ((MXFP8, 32), (NVFP4, 16), (A16, 16)):
        made = plan(MIXTURE, changes | {ENGINE + "tensor_parallel_size": 4})
        assert f"borders of its blocks of {block} " in one(check_alignment(made), "ok")
    split = {ENGINE + "tensor_parallel_size": 16}
    assert "does not divide" in said(check_alignment(plan(MIXTURE, MXFP8 | split)), "error")[0]
    errors = said(check_alignment(plan(MIXTURE, NVFP4 | split)), "error")
    assert errors[0].startswith(
        "engine: mlp.experts.*.gate_proj has 48 rows in a process, and kernels of 4 bits take multiples of 32"
    )


def test_ragged_blocks_are_no_blocks_of_these_formats(plan, tmp_path):
    """They are padded in FP8 (a warning)."""
    config = KNOWN_MODELS[LLAMA] | {"hidden_size": 4100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ragged = said(check_alignment(plan(str(tmp_path), MXFP8)), "error")
    assert "4100 columns, no multiple of 32: its last blocks are ragged, which kernels do not take" in ragged[0]


# Batches


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (LLAMA, {TRAINER + "tensor_model_parallel_size": 3}, "8 trainer GPUs are no multiple of 3"),
        (LLAMA, {TRAINER + "expert_model_parallel_size": 2}, "the model has no experts; set it to 1"),
        (LLAMA, {TRAINER + "pipeline_model_parallel_size": 8, "policy.train_global_batch_size": 511}, "511 does not"),
        (LLAMA, {"policy.train_global_batch_size": 4}, "4 is no multiple of the 8 data-parallel replicas"),
        (LLAMA, {ENGINE + "tensor_parallel_size": 3}, "8 engine GPUs are no multiple of 3"),
        (LLAMA, {ENGINE + "max_model_len": 8192}, "max_model_len=8192 is above policy.max_total_sequence_length=4096"),
        (LLAMA, {"policy.sequence_packing.train_mb_tokens": 2048}, "train_mb_tokens=2048 holds no sequence"),
        (
            MIXTURE,
            SPREAD
            | {"policy.sequence_packing": {"enabled": False}, "policy.make_sequence_length_divisible_by": 64}
            | {"policy.dynamic_batching": {"enabled": True, "train_mb_tokens": 4096, "sequence_length_round": 3}},
            "dynamic_batching.sequence_length_round=3 must be a multiple of 4",
        ),
        (LLAMA, {TRAINER + "context_parallel_size": 2}, "must be a multiple of 4"),
        (MIXTURE, SPREAD | {TRAINER + "sequence_parallel": False}, "with experts needs sequence_parallel=true"),
        (MIXTURE, SPREAD | {TRAINER + "expert_model_parallel_size": 3}, "3 does not divide 128 experts"),
        (MIXTURE, SPREAD | {ENGINE + "tensor_parallel_size": 2, ENGINE + "expert_parallel_size": 3}, "multiple of"),
        (MIXTURE, SPREAD | {"policy.make_sequence_length_divisible_by": 2}, "must be a multiple of 4"),
        (LLAMA, {ENGINE + "pipeline_parallel_size": 2, ENGINE + "async_engine": False}, "needs .*async_engine=true"),
        (MIXTURE, SPREAD | {ENGINE + "expert_parallel_size": 8, ENGINE + "async_engine": True}, "=8 with async_engine"),
        (MIXTURE, SPREAD | {ENGINE + "expert_parallel_size": 64}, "engine GPUs are no multiple of 64"),
        (
            "Qwen/Qwen3-8B",
            {TRAINER + "pipeline_model_parallel_size": 8},
            "pipeline_model_parallel_size=8 does not share 36 layers equally",
        ),
    ],
)
def test_numbers_that_do_not_go_into_one_another(plan, model, changes, message):
    assert any(re.search(message, text) for text in said(check_batches(plan(model, changes)), "error"))


def test_microbatches_without_packing(plan):
    padded = {"policy.sequence_packing": {"enabled": False}, "policy.make_sequence_length_divisible_by": 16}
    assert said(check_batches(plan(LLAMA, padded)), "error") == []
    three = padded | {"policy.train_micro_batch_size": 3}
    assert "train_micro_batch_size=3 does not divide the 64 samples" in one(check_batches(plan(LLAMA, three)), "error")
    six = padded | {"policy.logprob_batch_size": 6}
    assert "logprob_batch_size=6 does not divide the 64 samples" in one(check_batches(plan(LLAMA, six)), "error")
    assert said(check_batches(plan(LLAMA, six | OURS)), "error") == []


NO_PACKS = {"policy.sequence_packing": {"enabled": False}, "policy.make_sequence_length_divisible_by": 64}
DYNAMIC = {"policy.dynamic_batching": {"enabled": True, "train_mb_tokens": 4096, "sequence_length_round": 64}}
FOUR = {
    TRAINER + "tensor_model_parallel_size": 4,
    "policy.train_micro_batch_size": 1,
    "policy.logprob_batch_size": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (NO_PACKS | DYNAMIC | {TRAINER + "pipeline_model_parallel_size": 2}, "one pipeline stage in NeMo RL's trainer"),
        (
            {"policy.sequence_packing.logprob_mb_tokens": 512},
            "sequence_packing.logprob_mb_tokens=512 holds no sequence of policy.max_total_sequence_length=4096",
        ),
        (
            {"policy.make_sequence_length_divisible_by": 4097},
            "train_mb_tokens=4096 holds no sequence of policy.max_total_sequence_length=4096 tokens, padded to 4097",
        ),
        (
            NO_PACKS | {"policy.dynamic_batching": DYNAMIC["policy.dynamic_batching"] | {"train_mb_tokens": 512}},
            "dynamic_batching.train_mb_tokens=512 holds no sequence",
        ),
        (
            NO_PACKS | DYNAMIC | {"policy.make_sequence_length_divisible_by": 1},
            "make_sequence_length_divisible_by=1 must be a multiple of 16",
        ),
        (DYNAMIC, "exclude each other in NeMo RL's trainer: set one of them to false"),
        (
            NO_PACKS | {TRAINER + "context_parallel_size": 2},
            "context_parallel_size=2 needs policy.sequence_packing.enabled=true",
        ),
        (FOUR, "set policy.logprob_batch_size=1 as policy.train_micro_batch_size, got 4"),
        ({"policy.logprob_chunk_size": 1024}, "needs policy.megatron_cfg.defer_fp32_logits=true"),
        ({TRAINER + "use_fused_linear_logprobs": True}, "does not support packed sequences"),
        (
            {"loss_fn.force_on_policy_ratio": True, "policy.train_global_batch_size": 256},
            "set policy.train_global_batch_size=512, got 256",
        ),
    ],
)
def test_what_nemo_rls_own_workers_assert_of_batches(plan, changes, message):
    """Of theirs alone: ours pack and chunk in their own way."""
    assert message in one(check_batches(plan(LLAMA, changes)), "error")
    assert message not in str(said(check_batches(plan(LLAMA, changes | {"nemo_fp8rl.workers": "ours"})), "error"))


def test_batches_that_they_take(plan, monkeypatch):
    fused = NO_PACKS | {TRAINER + "use_fused_linear_logprobs": True}
    chunked = {"policy.logprob_chunk_size": 1024, TRAINER + "defer_fp32_logits": True}
    on_policy = FOUR | {"loss_fn.force_on_policy_ratio": True}
    alike = FOUR | {"policy.logprob_batch_size": 1}
    for changes in (NO_PACKS | DYNAMIC, fused, chunked, on_policy, alike):
        assert said(check_batches(plan(LLAMA, changes)), "error") == []
    monkeypatch.setenv("NRL_IGNORE_TP_ACCURACY_CHECK", "1")
    assert said(check_batches(plan(LLAMA, FOUR)), "error") == []


def test_fp8_needs_whole_groups_of_tokens_on_each_rank(plan):
    padded = {"policy.sequence_packing": {"enabled": False}, "policy.make_sequence_length_divisible_by": 8}
    assert "must be a multiple of 16" in one(check_batches(plan(LLAMA, padded)), "error")
    parallel = SPREAD | padded | {"policy.make_sequence_length_divisible_by": 16}
    assert "must be a multiple of 64" in one(check_batches(plan(MIXTURE, parallel)), "error")
    bf16 = padded | {TRAINER + "fp8_cfg": {"enabled": False}}
    assert said(check_batches(plan(LLAMA, bf16)), "error") == []


# Precision


@pytest.mark.parametrize(
    ("changes", "level", "message"),
    [
        ({ENGINE + "precision": "bfloat16"}, "error", "samples in another precision"),
        (
            {"loss_fn.use_importance_sampling_correction": False},
            "error",
            "NeMo RL does not start an FP8 engine without",
        ),
        ({"loss_fn.truncated_importance_sampling_type": None}, "warn", "weights without a bound"),
        ({"nemo_fp8rl.correction": {"preset": "icepop"}}, "error", "set that to false"),
        ({ENGINE + "quantization_ignored_layer_kws": ["o_proj"]}, "warn", "self_attn.o_proj of layers 0 to 31"),
        ({ENGINE + "kv_cache_dtype": "fp8", "nemo_fp8rl.kv": "rollout"}, "warn", "see nemo_fp8rl.kv"),
        ({ENGINE + "kv_cache_dtype": "fp8", ENGINE + "async_engine": True}, "error", "async_engine=false"),
        (
            {ENGINE + "kv_cache_dtype": "fp8", "grpo.async_grpo": {"enabled": True}},
            "error",
            "set policy.generation.vllm_cfg.kv_cache_dtype=auto",
        ),
        ({ENGINE + "kv_cache_dtype": "fp8", "grpo.val_at_start": True}, "error", "val_at_start=true"),
        (
            {ENGINE + "kv_cache_dtype": "fp8", TRAINER + "pipeline_model_parallel_size": 2},
            "error",
            "is calibrated on one pipeline stage, got 2: set policy.megatron_cfg.pipeline_model_parallel_size=1",
        ),
    ],
)
def test_disagreements(plan, changes, level, message):
    assert message in one(check_agreement(plan(LLAMA, changes)), level)


@pytest.mark.parametrize(
    ("workers", "asynchronous", "level", "message"),
    [
        ("nemo_rl", False, "warn", "nothing weighs a token by how far trainer and engine disagree"),
        ("nemo_rl", True, "error", "NeMo RL does not start its asynchronous loop without"),
        ("ours", False, "warn", "nothing weighs a token by how far trainer and engine disagree"),
    ],
)
def test_an_fp8_engine_needs_no_correction_where_nemo_rls_setup_is_not_told_of_it(
    plan, workers, asynchronous, level, message
):
    changes = {
        "nemo_fp8rl.workers": workers,
        "loss_fn.use_importance_sampling_correction": False,
        "grpo.async_grpo": {"enabled": asynchronous},
    }
    assert message in one(check_agreement(plan(LLAMA, changes)), level)


def test_our_own_correction_stands_for_nemo_rls(plan):
    instead = {
        "nemo_fp8rl.correction": {"preset": "icepop"},
        "loss_fn.use_importance_sampling_correction": False,
        "loss_fn.truncated_importance_sampling_type": None,
    }
    assert {finding.level for finding in check_agreement(plan(LLAMA, instead))} == {"ok"}


def test_our_own_correction_stands_beside_what_an_asynchronous_loop_asks_for(plan):
    changes = {
        "grpo.async_grpo": {"enabled": True},
        "nemo_fp8rl.correction": {"preset": "icepop"},
        "loss_fn.use_importance_sampling_correction": True,
        "loss_fn.truncated_importance_sampling_type": None,
    }
    assert {finding.level for finding in check_agreement(plan(LLAMA, changes))} == {"ok"}
    twice = changes | {"loss_fn.truncated_importance_sampling_type": "tis"}
    assert "contradicts loss_fn.truncated_" in one(check_agreement(plan(LLAMA, twice)), "error")


def test_float32_scales_on_both_sides_are_a_warning(plan):
    scales = {ENGINE + "pow2_weight_scaling_factors": False, ENGINE + "pow2_activation_scaling_factors": False}
    made = plan(LLAMA, scales | {TRAINER + "env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}})
    assert "float32 scales" in one(check_agreement(made), "warn")
    assert "Transformer Engine refuses float32 scales" in one(check_hardware(made, GPUS["b200"]), "error")


# Hardware


@pytest.mark.parametrize(
    ("gpu", "changes", "level", "message"),
    [
        ("a100", {}, "error", "FP8 needs a GPU of compute capability 8.9 or higher, and a100 has 8.0"),
        ("l40s", {}, "error", "9.0 or higher, and l40s has 8.9: set policy.megatron_cfg.fp8_cfg.enabled=false"),
        ("b200", {}, "warn", "emulates the blockwise recipe by MXFP8"),
        ("h100", {ENGINE + "use_deep_gemm": False}, "warn", "use_deep_gemm=false"),
    ],
)
def test_what_a_gpu_cannot_do(plan, gpu, changes, level, message):
    assert message in one(check_hardware(plan(LLAMA, changes), GPUS[gpu]), level)


@pytest.mark.parametrize(
    ("workers", "gpu", "level", "message"),
    [
        ("auto", "h100", "warn", "rounded up to powers of two"),
        ("nemo_rl", "h100", "ok", "multiplies the values that the refit sends"),
        ("auto", "b200", "warn", "rounded up to powers of two"),
        ("nemo_rl", "b200", "error", "DeepGEMM on b200 takes no float32 scales"),
    ],
)
def test_float32_scales_reach_the_kernels_of_nemo_rls_own_workers_as_they_are(plan, workers, gpu, level, message):
    scales = {ENGINE + "pow2_weight_scaling_factors": False, ENGINE + "pow2_activation_scaling_factors": False}
    changes = scales | {ENGINE + "use_deep_gemm": False, TRAINER + "fp8_cfg.enabled": False}
    assert message in one(check_hardware(plan(LLAMA, changes | {"nemo_fp8rl.workers": workers}), GPUS[gpu]), level)


def test_with_fp8_on_the_wire_vllms_own_switch_decides_on_deepgemm(plan):
    """And not use_deep_gemm, which NeMo RL's own FP8 reads. A backend of the experts is named."""
    wire = {"nemo_fp8rl.workers": "nemo_rl", ENGINE + "use_deep_gemm": False, TRAINER + "fp8_cfg.enabled": False}
    chosen = wire | {"policy.generation.vllm_kwargs": {"moe_backend": "triton"}}
    assert one(check_hardware(plan(MIXTURE, chosen), GPUS["h100"]), "ok").startswith(
        "DeepGEMM on h100 (experts: policy.generation.vllm_kwargs.moe_backend=triton) multiplies"
    )
    off = wire | {ENGINE + "env_vars": {"VLLM_USE_DEEP_GEMM": "0"}}
    assert "VLLM_USE_DEEP_GEMM='0': without DeepGEMM" in one(check_hardware(plan(LLAMA, off), GPUS["h100"]), "warn")


def test_a_bfloat16_recipe_runs_anywhere(plan):
    bf16 = {ENGINE + "precision": "bfloat16", TRAINER + "fp8_cfg": {"enabled": False}}
    assert {finding.level for finding in check_hardware(plan(LLAMA, bf16), GPUS["a100"])} == {"ok"}


def test_an_unknown_gpu_is_named():
    with pytest.raises(UserError, match="--gpu tpu is not known; known are a100"):
        gpu_by_name("tpu")


# Our own trainer and engines

OURS = {"nemo_fp8rl.workers": "ours"}
NOT_OURS = {
    TRAINER + "sequence_parallel": True,  # with a length that is no multiple of the ranks
    TRAINER + "tensor_model_parallel_size": 2,
    TRAINER + "pipeline_model_parallel_size": 2,
    "policy.sequence_packing": {"enabled": False},
    ENGINE + "kv_cache_dtype": "fp8",
    ENGINE + "async_engine": True,
    ENGINE + "use_deep_gemm": False,
    ENGINE + "quantization_ignored_layer_kws": ["o_proj"],
}


def test_what_nemo_rls_workers_alone_do_not_take_is_no_complaint(plan):
    def complaints(changes) -> list[tuple[str, str]]:
        made = plan(LLAMA, NOT_OURS | changes)
        checks = (*check_agreement(made), *check_batches(made), *check_hardware(made, GPUS["h100"]))
        return [(finding.level, finding.topic) for finding in checks if finding.level != "ok"]

    assert complaints(OURS) == []
    assert sorted(complaints({})) == [
        ("error", "batches"),
        *[("error", "precision")] * 2,
        ("warn", "hardware"),
        ("warn", "precision"),
    ]


@pytest.mark.parametrize(("gpu", "kernels"), [("l40s", "CUTLASS"), ("h100", "DeepGEMM, CUTLASS"), ("b200", "CUTLASS")])
def test_ours_multiply_by_what_the_engine_takes_there(plan, gpu, kernels):
    rollout = OURS | {TRAINER + "fp8_cfg.enabled": False}
    assert f"our engines on {gpu} multiply what the refit sends, by {kernels} or Triton" in said(
        check_hardware(plan(LLAMA, rollout), GPUS[gpu]), "ok"
    )


@pytest.mark.parametrize("workers", ["auto", "nemo_rl"])
def test_an_fp8_kv_cache_of_latent_attention_has_no_scales_from_nemo_rls_own_trainer(plan, workers):
    cache = {ENGINE + "kv_cache_dtype": "fp8", "nemo_fp8rl.workers": workers}
    text = one(check_hardware(plan(LATENT, cache), gpu_by_name("h100")), "error")
    assert "no scales for latent attention" in text and text.endswith("kv_cache_dtype=auto")


def test_ours_run_without_a_correction_and_say_so(plan):
    text = one(check_agreement(plan(LLAMA, OURS | {"loss_fn.use_importance_sampling_correction": False})), "warn")
    assert "nothing weighs a token" in text


@pytest.mark.parametrize(("workers", "level"), [(OURS, "warn"), ({}, "error")])
def test_flashinfer_keeps_a_caches_scales_out_of_a_cuda_graph(plan, workers, level):
    cache = workers | {ENGINE + "kv_cache_dtype": "fp8"}
    graphs = plan(LLAMA, cache | {ENGINE + "enforce_eager": False})

    def warned(plan, gpu):
        return any("enforce_eager must not be" in text for text in said(check_hardware(plan, GPUS[gpu]), level))

    assert {gpu: warned(graphs, gpu) for gpu in ("l40s", "h100", "b200")} == {"l40s": True, "h100": False, "b200": True}
    for eager in (True, None):
        assert not warned(plan(LLAMA, cache | {ENGINE + "enforce_eager": eager}), "b200")
    kwargs = "policy.generation.vllm_kwargs"
    pieces = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    for gpu, chosen, graphs_end in (
        ("b200", {"attention_backend": "TRITON_ATTN"}, False),
        ("h100", {"attention_backend": "FLASHINFER"}, True),
        ("b200", pieces, False),
    ):
        chosen = plan(LLAMA, cache | {ENGINE + "enforce_eager": False, kwargs: chosen})
        assert warned(chosen, gpu) is graphs_end
    aligned = plan(LLAMA, cache | {ENGINE + "enforce_eager": False, "nemo_fp8rl.align": "vllm"})
    assert warned(aligned, "b200") is (level == "error")  # NeMo RL's own engines have vLLM's attention


def test_nemo_rls_trainer_has_the_engines_last_layers_in_bfloat16(plan):
    findings = list(check_agreement(plan(LLAMA, {ENGINE + "num_last_layers_in_bf16": 2})))
    assert said(findings, "warn") == []
    assert "the same linears are quantized in trainer and engine" in said(findings, "ok")


# The other formats


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (MXFP8, "mxfp8_e2e, pow2 scales, bfloat16 KV cache"),
        (NVFP4, "nvfp4_e2e, pow2 scales, bfloat16 KV cache"),
        (A16, "nvfp4_a16_e2e, pow2 scales, bfloat16 KV cache"),
        (A16 | {"policy.quant_cfg": None}, "nvfp4_a16_rollout, pow2 scales, bfloat16 KV cache"),
    ],
)
def test_the_precision_of_the_other_formats_is_said(plan, changes, text):
    findings = list(check_agreement(plan(MIXTURE, changes)))
    assert text in said(findings, "ok")
    assert {finding.level for finding in findings} == {"ok"}


def test_float32_global_scales_are_a_warning_of_their_own(plan):
    scales = {ENGINE + "pow2_weight_scaling_factors": False, ENGINE + "pow2_activation_scaling_factors": False}
    assert "float32 global scales follow" in one(check_agreement(plan(MIXTURE, A16 | scales)), "warn")


@pytest.mark.parametrize(("gpu", "changes"), [("h200", MXFP8), ("h200", NVFP4), ("a100", MXFP8)])
def test_older_gpus_multiply_rounded_activations_by_marlin(plan, gpu, changes):
    assert "by Marlin in bfloat16, after they round" in one(check_hardware(plan(MIXTURE, changes), GPUS[gpu]), "warn")


@pytest.mark.parametrize(
    ("gpu", "changes", "kernels"),
    [
        ("b200", MXFP8, "MXFP8 by CUTLASS"),
        ("b200", NVFP4, "CUTLASS or FlashInfer"),
        ("a100", A16, "NVFP4 by Marlin"),
    ],
)
def test_gpus_that_multiply_the_other_formats(plan, gpu, changes, kernels):
    trainer, engine = said(check_hardware(plan(MIXTURE, changes), GPUS[gpu]), "ok")
    assert f"our trainer on {gpu} multiplies the values" in trainer
    assert engine.startswith(f"our engines on {gpu} multiply") and engine.endswith(kernels)


# Adapters


def with_adapters(**keys) -> dict:
    return {TRAINER + "peft": {"enabled": True, "dim": 32, "alpha": 32} | keys}


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", MIXTURE])
def test_what_a_later_refit_carries_is_the_adapters_of_the_trainer(plan, tmp_path, model):
    made = plan(model, OURS | with_adapters(exclude_modules=["linear_proj"]))
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS[model]))
    hf = read_hf_config(str(tmp_path))
    values = sum(math.prod(shape) for shape in adapter_tensors(hf, read_adapters(hf, made.peft)).values())
    assert f"carries {2 * values / 1e6:,.0f} MB" in one(check_adapters(made), "ok")
    assert list(check_adapters(plan(model, OURS))) == []


def test_a_later_refit_of_7b_at_rank_32_is_about_a_hundredth_of_the_model(plan):
    text = one(check_adapters(plan("Qwen/Qwen2.5-7B", OURS | with_adapters())), "ok")
    assert text == "71.1 M parameters of adapters, 0.93 % of the model's: a refit after the first carries 142 MB"
    assert "NeMo RL's own refits carry the whole model" in one(check_adapters(plan(LLAMA, with_adapters())), "ok")


@pytest.mark.parametrize(("rate", "warns"), [(3e-7, True), (1e-6, True), (5e-6, False), (1e-5, False)])
def test_a_learning_rate_of_all_parameters_is_too_small_for_adapters(plan, rate, warns):
    rates = {TRAINER + "optimizer.lr": rate}
    texts = said(check_learning_rate(plan(LLAMA, rates | with_adapters())), "warn")
    assert bool(texts) == warns
    assert all(text.startswith(f"policy.megatron_cfg.optimizer.lr={rate:g} is one for all") for text in texts)
    assert list(check_learning_rate(plan(LLAMA, rates))) == []


def test_a_key_of_adapters_that_has_no_such_value_is_named(plan):
    with pytest.raises(UserError, match=r"policy\.megatron_cfg\.peft\.dim"):
        list(check_adapters(plan(LLAMA, with_adapters(dim="many"))))
