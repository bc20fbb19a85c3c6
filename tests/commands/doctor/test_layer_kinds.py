"""Models whose layers differ in kind: names, memory, what is FP8 where, and what the workers say."""

import json

import pytest

from nemo_fp8rl.commands.doctor.alignment.block_alignment import check_alignment
from nemo_fp8rl.commands.doctor.hardware import GPUS
from nemo_fp8rl.commands.doctor.known_models import KNOWN_MODELS
from nemo_fp8rl.commands.doctor.memory.engine_memory import (
    WORKSPACE,
    engine_weights,
    kv_bytes_per_token,
    state_bytes_per_sequence,
)
from nemo_fp8rl.commands.doctor.memory.phases import check_memory, memory_of
from nemo_fp8rl.commands.doctor.memory.trainer_memory import activations
from nemo_fp8rl.commands.doctor.model_shapes import shape_of
from nemo_fp8rl.commands.doctor.models.read_config import from_config
from nemo_fp8rl.commands.doctor.precision_agreement import check_agreement
from nemo_fp8rl.commands.doctor.worker_limits import check_workers
from nemo_fp8rl.common.errors import UserError
from tests.commands.doctor.conftest import ENGINE, TRAINER

DENSE, MIXTURE, SUPER = "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"
NANO, V3, GLM, OSS = (
    *("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "deepseek-ai/DeepSeek-V3"),
    *("zai-org/GLM-5.1", "openai/gpt-oss-20b"),
)
WORDS = ["linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "visual"]
"""What NeMo RL's FP8 recipes for Qwen3.5 keep in bfloat16 in the engine."""
IGNORED = {ENGINE + "quantization_ignored_layer_kws": WORDS}


def said(findings, level: str) -> list[str]:
    return [finding.text for finding in findings if finding.level == level]


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        (DENSE, {"gated_delta_net": 24, "attention": 8, "mlp": 32}),
        (MIXTURE, {"gated_delta_net": 30, "attention": 10, "mixture": 40}),
        (NANO, {"mamba": 23, "attention": 6, "mixture": 23}),
        (SUPER, {"mamba": 40, "attention": 8, "mixture": 40}),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", {"mamba": 28, "attention": 6, "mlp": 28}),
        (V3, {"latent_attention": 61, "mlp": 3, "mixture": 58}),
        (OSS, {"sliding_attention": 12, "attention": 12, "mixture": 24}),
    ],
)
def test_layers_of_each_kind_as_the_model_cards_say(model, counts):
    parts = [part for layer in shape_of(model).parts for part in layer]
    assert {part: parts.count(part) for part in parts} == counts


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (DENSE, ["model.language_model.layers.0.linear_attn.in_proj_qkv.weight", "model.language_model.norm.weight"]),
        (DENSE, ["model.language_model.layers.3.self_attn.q_proj.weight"]),
        (MIXTURE, [f"model.language_model.layers.0.mlp.{x}.weight" for x in ("shared_expert_gate", "gate")]),
        (
            NANO,
            ["backbone.embeddings.weight", "backbone.layers.0.mixer.A_log", "backbone.layers.5.mixer.q_proj.weight"],
        ),
        (NANO, ["backbone.layers.1.norm.weight", "backbone.layers.1.mixer.gate.e_score_correction_bias"]),
        (SUPER, ["backbone.layers.1.mixer.fc1_latent_proj.weight", "lm_head.weight", "backbone.norm_f.weight"]),
        (GLM, ["model.layers.0.self_attn.indexer.wq_b.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"]),
        ("Qwen/Qwen2.5-Omni-7B", ["thinker.model.layers.0.self_attn.q_proj.bias"]),
        (OSS, ["model.layers.0.self_attn.sinks", "model.layers.0.mlp.router.bias"]),
    ],
)
def test_names_are_those_of_the_checkpoints(model, names):
    shape = shape_of(model)
    weights = [shape.embedding(), *shape.head(), *(w for i in range(shape.layers) for w in shape.layer(i))]
    found = [weight.name for weight in weights]
    assert set(names) <= set(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("key", "name", "layers"),
    [
        ("text_config", "Qwen/Qwen3.5-9B", 32),
        ("llm_config", NANO, 52),
        ("thinker_config", "Qwen/Qwen3-Omni-30B-A3B-Instruct", 48),
    ],
)
def test_the_decoder_of_a_model_with_encoders_is_in_a_block_of_its_own(key, name, layers):
    config = {k: v for k, v in KNOWN_MODELS[name].items() if k not in ("text_config", "vision_config", "audio_config")}
    inner = KNOWN_MODELS[name].get("text_config", config)
    wrapped = {"model_type": "x", "vision_config": {"depth": 1}, key: inner}
    if key == "thinker_config":
        wrapped = {"model_type": "x", key: {"text_config": inner, "vision_config": {}, "tie_word_embeddings": True}}
    shape = from_config(wrapped, "x")
    assert (shape.layers, shape.uncounted) == (layers, ("vision_config",))
    assert shape.tied == (key == "thinker_config")  # what encloses the decoder decides, as in transformers 5


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            NANO,
            {"hybrid_override_pattern": "MX*"},
            r"hybrid_override_pattern has 'X', and the doctor knows M, E, \*, -",
        ),
        (NANO, {"hybrid_override_pattern": None}, "x lacks hybrid_override_pattern"),
        (NANO, {"hybrid_override_pattern": 7}, "must name the kind of each layer, got 7"),
        (NANO, {"mamba_num_heads": None}, "lacks mamba_num_heads"),
        (OSS, {"layer_types": ["full_attention", "chunked"]}, "layer_types has 'chunked'"),
        (OSS, {"sliding_window": None}, "lacks sliding_window"),
        (GLM, {"index_n_heads": None}, "lacks index_n_heads"),
        (V3, {"q_lora_rank": "1536"}, "q_lora_rank must be a whole number"),
    ],
)
def test_what_a_config_does_not_say_is_named(model, change, message):
    with pytest.raises(UserError, match=message):
        from_config(KNOWN_MODELS[model] | change, "x")


def test_kinds_by_list_are_those_by_pattern():
    config = KNOWN_MODELS[NANO]
    words = {"M": "mamba", "E": "moe", "*": "attention"}
    listed = config | {
        "hybrid_override_pattern": None,
        "layers_block_type": [words[letter] for letter in config["hybrid_override_pattern"]],
    }
    assert from_config(listed, "x").parts == shape_of(NANO).parts
    text = KNOWN_MODELS[DENSE]["text_config"]
    types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(32)]
    assert from_config(text | {"layer_types": types}, "x").parts == shape_of(DENSE).parts
    with pytest.raises(UserError, match="layer_types has 31 entries, give one for each of num_hidden_layers=32"):
        from_config(text | {"layer_types": types[1:]}, "x")


def test_a_config_file_of_a_known_family_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS[SUPER]))
    assert shape_of("/path/to/nemotron-super-omni-hf-checkpoint", tmp_path) == shape_of(SUPER)


# Memory


@pytest.mark.parametrize(
    ("model", "changes", "token", "sequence"),
    [
        # 8 layers x (keys and values) x 4 heads x 256 x 2 bytes; 24 x (32 x 128 x 128 floats, 3 tokens of 8192 in bf16)
        (DENSE, {}, 8 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
        (DENSE, {ENGINE + "kv_cache_dtype": "fp8"}, 8 * 2 * 4 * 256, 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
        (DENSE, {ENGINE + "tensor_parallel_size": 4}, 8 * 2 * 256 * 2, 6 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)),
        # 6 layers of 2 heads of 128; 23 x (64 heads x 64 x 128 floats, 3 tokens of 4096 + 2 x 8 x 128)
        (NANO, {}, 6 * 2 * 2 * 128 * 2, 23 * (64 * 64 * 128 * 4 + 3 * 6144 * 2)),
        (V3, {}, 61 * (512 + 64) * 2, 0),
        (V3, {ENGINE + "tensor_parallel_size": 8}, 61 * (512 + 64) * 2, 0),
        # beside the latent a key of the indexer: 128 bytes and a float32 scale
        (GLM, {}, 78 * ((512 + 64) * 2 + 128 + 4), 0),
        # 12 layers with all tokens, 12 with the last 128
        (OSS, {}, 12 * 2 * 8 * 64 * 2, 12 * 128 * 2 * 8 * 64 * 2),
    ],
)
def test_bytes_of_a_token_and_of_a_sequence_in_an_engine(plan, model, changes, token, sequence):
    made = plan(model, changes)
    assert kv_bytes_per_token(made) == token
    assert state_bytes_per_sequence(made) == sequence


def test_states_of_sequences_take_room_from_their_tokens(plan):
    made = plan(DENSE, IGNORED)
    memory, gpu = memory_of(made, GPUS["h100"]), GPUS["h100"]
    room = gpu.memory * 0.6 - engine_weights(made) - WORKSPACE
    each = 4096 * kv_bytes_per_token(made) + state_bytes_per_sequence(made)
    assert memory.cache_tokens == pytest.approx(4096 * room / each, abs=1)
    assert memory.state_bytes == state_bytes_per_sequence(made)
    (warning,) = said(check_memory(made, gpu, memory), "warn")
    assert warning == "these are the bytes of the decoder: the encoders (vision_config) are on the GPUs, too"


def test_activations_of_a_layer_of_each_kind(plan):
    """Bytes of a token: of each part the inputs of norm and linear, and what it keeps."""
    made = plan("nvidia/NVIDIA-Nemotron-Nano-12B-v2", {"policy.sequence_packing.train_mb_tokens": 1})
    inputs, mamba = 2 * 5120, 2 * (10240 + 2 * 1024) + 2 * 10240 + 2 * 128
    attention, mlp = (40 + 8) * 256, 2 * 20480
    assert activations(made, 0) == 2 * (62 * inputs + 28 * mamba + 6 * attention + 28 * mlp)
    gated = plan(DENSE, {"policy.sequence_packing.train_mb_tokens": 1})
    inputs, delta = 4 * 4096, 2 * 8192 + 2 * 4096 + 2 * 32
    attention, mlp = (16 + 4) * 512 + 16 * 256, 3 * 12288
    assert activations(gated, 0) == 2 * (32 * (inputs + mlp) + 24 * delta + 8 * attention)


# What is FP8


def fp8_names(weights, is_fp8) -> set[str]:
    return {weight.name.partition(".layers.")[2].partition(".")[2].removesuffix(".weight") for weight in weights
            if is_fp8(weight)}  # fmt: skip


def test_fp8_of_a_gated_delta_net_under_nemo_rls_words(plan):
    made = plan(MIXTURE, IGNORED | {ENGINE + "num_first_layers_in_bf16": 1})
    assert not any(map(made.is_fp8_in_engine, made.shape.layer(0)))
    projections = {f"linear_attn.{x}" for x in ("in_proj_qkv", "in_proj_z", "out_proj")}
    experts = {f"mlp.{e}.{x}_proj" for e in ("experts.*", "shared_expert") for x in ("gate", "up", "down")}
    assert fp8_names(made.shape.layer(1), made.is_fp8_in_engine) == projections | experts
    rest = {f"linear_attn.in_proj_{x}" for x in "ba"}
    assert fp8_names(made.shape.layer(1), made.is_fp8_in_trainer) == projections | experts | rest
    (differ,) = said(check_agreement(made), "warn")
    assert differ.startswith(
        "linear_attn.in_proj_b, linear_attn.in_proj_a of layers 1 to 38 are bfloat16 in the engine"
    )


def test_fp8_of_nemotron_and_of_latent_attention(plan):
    made = plan(SUPER)
    assert fp8_names(made.shape.layer(0), made.is_fp8_in_engine) == {"mixer.in_proj", "mixer.out_proj"}
    mixture = {f"mixer.{e}.{x}_proj" for e in ("experts.*", "shared_experts") for x in ("up", "down")}
    latent = {f"mixer.fc{i}_latent_proj" for i in (1, 2)}
    assert fp8_names(made.shape.layer(1), made.is_fp8_in_engine) == mixture | latent
    v3 = plan(V3, {ENGINE + "quantization_ignored_layer_kws": ["a_proj", "b_proj"]})
    mlp = {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert fp8_names(v3.shape.layer(0), v3.is_fp8_in_engine) == mlp | {"self_attn.o_proj"}


def test_nemo_rls_layouts_of_qwen35_split_whole_blocks(plan):
    dense = {TRAINER + "tensor_model_parallel_size": 4, TRAINER + "sequence_parallel": True}
    for model, changes in (
        (DENSE, dense),
        (MIXTURE, {TRAINER + "tensor_model_parallel_size": 2, ENGINE + "tensor_parallel_size": 2}),
    ):
        (finding,) = check_alignment(plan(model, changes | IGNORED))
        assert finding.level == "ok"


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (DENSE, {}, "engine: linear_attn.in_proj_b has 32 rows, no multiple of 128, and another matrix follows"),
        (
            DENSE,
            IGNORED | {ENGINE + "tensor_parallel_size": 32},
            "engine: policy.generation.vllm_cfg.tensor_parallel_size=32 does not divide the model's "
            "num_attention_heads=16",
        ),
        (
            MIXTURE,
            IGNORED | {ENGINE + "tensor_parallel_size": 8},
            "=8 does not divide the model's rows of mlp.experts.*.gate_proj=512 in multiples of 128",
        ),
        (NANO, {}, "engine: mixer.in_proj has 64 rows, no multiple of 128, and another matrix follows"),
        (NANO, {ENGINE + "tensor_parallel_size": 16}, "does not divide the model's n_groups=8"),
        (V3, {ENGINE + "tensor_parallel_size": 3}, "does not divide the model's num_attention_heads=128"),
    ],
)
def test_what_is_no_whole_block_is_named(plan, model, changes, message):
    assert any(message in text for text in said(check_alignment(plan(model, changes)), "error"))


# Workers


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            DENSE,
            IGNORED,
            "this family's are model.language_model.layers in the checkpoint and language_model.model.lay",
        ),
        (
            "Qwen/Qwen2.5-VL-3B-Instruct",
            {},
            "are model.layers in the checkpoint and language_model.model.layers in vLLM",
        ),
        (
            "Qwen/Qwen2.5-Omni-7B",
            {},
            "are thinker.model.layers in the checkpoint and language_model.model.layers in vLLM",
        ),
        (SUPER, {}, "this family's are backbone.layers in the checkpoint and model.layers in vLLM"),
        (V3, {}, "differ in whether kv_a_proj_with_mqa are FP8: add these words to policy.generation.vllm_cfg.quant"),
        (GLM, {}, "differ in whether kv_a_proj_with_mqa, wq_b, wk, weights_proj are FP8"),
    ],
)
def test_fp8_on_the_wire_that_does_not_carry_a_family_is_named(plan, model, changes, message):
    (finding,) = check_workers(plan(model, changes | {"nemo_fp8rl.workers": "nemo_rl"}), True)
    assert finding.level == "error" and message in finding.text


@pytest.mark.parametrize("model", [V3, "moonshotai/Moonlight-16B-A3B"])
def test_fp8_on_the_wire_carries_deepseek_under_nemo_rls_words(plan, model):
    words = {ENGINE + "quantization_ignored_layer_kws": ["a_proj", "b_proj"], "nemo_fp8rl.workers": "nemo_rl"}
    assert list(check_workers(plan(model, words), True)) == []


@pytest.mark.parametrize("model", [DENSE, SUPER, OSS])
def test_without_fp8_nemo_rls_own_workers_take_every_family(plan, model):
    bf16 = {ENGINE + "precision": "bfloat16", TRAINER + "fp8_cfg.enabled": False, "nemo_fp8rl.workers": "nemo_rl"}
    assert list(check_workers(plan(model, bf16), True)) == []
