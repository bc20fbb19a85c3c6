"""Reading an HF checkpoint folder: sizes, names, tensors; and errors, which name the tensor or key."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nemo_fp8rl.commands.doctor.models.read_config import from_config
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.vllm_version import vllm_version
from nemo_fp8rl.hf import checkpoint_reader
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.model_config import FAMILIES, HfConfig, check_context, read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.layers.rope import read_rope
from nemo_fp8rl.policy.weights.hf_names import from_hf, to_hf
from nemo_fp8rl.policy.weights.layout import Layout

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}
HF = HfConfig(
    **{key: value for key, value in CONFIG.items() if key not in ("model_type", "eos_token_id")},
    family=FAMILIES["qwen3"],
    rope_type="default",
    eos_token_ids=(1,),
)


@pytest.fixture
def folder(tmp_path_factory):
    """Its path holds no word of a test's name, which a message could be taken for."""
    return tmp_path_factory.mktemp("x")


def random_tensors(hf: HfConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in expected_tensors(hf).items()}


# config.json


def write_config(folder, **changes) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def refused_config(folder, **changes) -> str:
    write_config(folder, **changes)
    with pytest.raises(UserError) as caught:
        read_hf_config(folder)
    return str(caught.value)


def test_sizes_are_read_from_config_json(folder):
    write_config(folder)
    assert read_hf_config(folder) == read_hf_config(str(folder)) == HF


def test_values_that_hf_leaves_out_have_hfs_defaults(folder):
    small = {key: CONFIG[key] for key in list(CONFIG)[:6]} | {"max_position_embeddings": 256, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(small))
    hf = read_hf_config(folder)
    assert (hf.num_key_value_heads, hf.rms_norm_eps, hf.rope_theta) == (4, 1e-6, 10000.0)
    assert (hf.tie_word_embeddings, hf.eos_token_ids) == (False, ())


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_a_config_that_does_not_say_their_size_are_as_wide_as_hfs(folder, family):
    from transformers import AutoConfig

    said = {**CONFIG, **MIXTURE, "model_type": family, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps({key: said[key] for key in said if key != "head_dim"}))
    theirs = AutoConfig.from_pretrained(folder)
    ours = read_hf_config(folder).head_dim
    assert ours == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)  # as its modules read
    assert ours == from_config(said | {"head_dim": None}, "x").head_dim == (128 if family == "qwen3" else 16)


def test_rope_theta_is_read_from_both_places_that_hf_writes_it(folder):
    write_config(folder, rope_theta=5e5)
    assert read_hf_config(folder).rope_theta == 5e5
    write_config(folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 3e5})
    assert read_hf_config(folder).rope_theta == 3e5


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(1, None, {1}), ([1, 2], None, {1, 2}), (None, 3, {3}), (1, [1, 3], {1, 3}), (None, None, set()), (0, None, {0})],
)
def test_every_end_of_sequence_token_is_known(folder, in_config, in_generation, expected):
    write_config(folder, eos_token_id=in_config)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert set(read_hf_config(folder).eos_token_ids) == expected


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


def without(name: str) -> dict:
    return {key: value for key, value in LLAMA3.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"model_type": "qwen2_moe"}, "'qwen2_moe' is not supported"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "already quantized"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention'] is not supported, only full_attention",
        ),
        ({"layer_types": 2}, "layer_types 2 is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, give one for each of num_hidden_layers=2"),
        ({"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta of rope_type 'yarn' must be above 1, got 1"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "'yarn' needs a factor of 1 or more, got 0.5"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs a factor of 1 or more, got None"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "'linear' needs a factor of 1 or more, got '4'"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "'linear' with a point alone; write 4.0"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "'longrope'"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": None}},
            "low_freq_factor of rope_type 'llama3' must be a finite",
        ),
        ({"rope_scaling": without("high_freq_factor")}, "high_freq_factor of rope_type 'llama3' must be a finite"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": "1"}}, "low_freq_factor of rope_type 'llama3' must be a finite"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": -4.0}}, "must be a finite number above 0, got -4.0"),
        ({"rope_scaling": without(ORIGINAL)}, f"{ORIGINAL} of rope_type 'llama3' must be a finite number above 0"),
        ({"rope_scaling": LLAMA3, ORIGINAL: None}, f"{ORIGINAL} of rope_type 'llama3' must be a finite number above 0"),
        (
            {"rope_parameters": YARN | {"beta_fast": "x"}},
            "beta_fast of rope_type 'yarn' must be a finite number above 0",
        ),
        (
            {"rope_parameters": YARN | {"beta_fast": None}},
            "beta_fast of rope_type 'yarn' must be a finite number above",
        ),
        (
            {"rope_parameters": YARN | {"beta_slow": -1}},
            "beta_slow of rope_type 'yarn' must be a finite number above 0",
        ),
        ({"rope_parameters": YARN | {ORIGINAL: 0}}, f"{ORIGINAL} of rope_type 'yarn' must be a finite number above 0"),
        (
            {"rope_parameters": YARN | {"attention_factor": "x"}},
            "attention_factor of rope_type 'yarn' must be a finite",
        ),
        (
            {"rope_parameters": YARN | {"mscale": "x"}},
            "mscale of rope_type 'yarn' must be a finite number of 0 or more",
        ),
        ({"rope_parameters": YARN | {"mscale_all_dim": [1]}}, "mscale_all_dim of rope_type 'yarn' must be a finite"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": YARN}, "'dynamic'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),  # the key before transformers 4.43
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": None, "hidden_size": 50, "model_type": "llama"}, "does not divide hidden_size=50"),
        ({"head_dim": None}, "lacks head_dim"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_theta": "x"}, "rope_theta must be a finite number"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number above 0, got None"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a finite number above 0, got -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": 1.5}, "eos_token_id must be a token's number"),
        ({"eos_token_id": ["x"]}, "eos_token_id must be a token's number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be a whole number in 1..10000"),
        ({"vocab_size": 10**4000}, "vocab_size must be a whole number in 1..100000000"),
    ],
)
def test_what_the_policy_does_not_build_is_refused(folder, changes, named):
    assert named in refused_config(folder, **changes)


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {ORIGINAL: 64},
        {"attention_factor": None, "mscale": None, "mscale_all_dim": None},
        {"beta_fast": 16, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0, "attention_factor": 1.1},
    ],
)
def test_yarn_may_leave_its_numbers_to_hf(folder, numbers):
    write_config(folder, rope_scaling=YARN | numbers)
    expected = numbers.get("attention_factor") or 0.1 * math.log(4) + 1
    assert read_rope(folder, read_hf_config(folder)).factor == expected


@pytest.mark.parametrize(
    ("rope", "positions", "longest", "said"),
    [
        (None, 256, 256, "max_position_embeddings=256; lower it$"),
        ({"rope_type": "linear", "factor": 2.5}, 256, 640, r"=256 times the factor=2\.5 of its RoPE; lower it$"),
        (LLAMA3, 256, 256, "max_position_embeddings=256; lower it$"),
        (YARN | {ORIGINAL: 64}, 256, 256, "max_position_embeddings=256; lower it$"),
        (YARN | {ORIGINAL: 64}, 64, 64, "lower it, or set that to 256 in its config.json, the context of its YaRN$"),
    ],
    ids=["unscaled", "linear", "llama3", "yarn", "yarn with short positions"],
)
def test_sequences_are_as_long_as_vllm_accepts(folder, rope, positions, longest, said):
    from vllm.config import ModelConfig

    write_config(folder, rope_scaling=rope, max_position_embeddings=positions, architectures=["Qwen3ForCausalLM"])
    hf = read_hf_config(folder)
    check_context(hf, longest)
    with pytest.raises(UserError, match=rf"max_total_sequence_length={longest + 1} is above the model's .*{said}"):
        check_context(hf, longest + 1)
    if vllm_version() == (0, 32):  # before 0.32 YaRN's was its original context times its factor
        engine = {"model": str(folder), "skip_tokenizer_init": True}
        assert ModelConfig(**engine).max_model_len == longest
        assert ModelConfig(**engine, max_model_len=longest).max_model_len == longest
        with pytest.raises(ValueError, match="max_model_len"):
            ModelConfig(**engine, max_model_len=longest + 1)


def test_sequences_are_as_long_as_vllms_table_of_yarn(folder):
    """vLLM would read beyond it, where the config has more positions."""
    write_config(folder, rope_scaling=YARN | {ORIGINAL: 64}, max_position_embeddings=512)
    hf = read_hf_config(folder)
    check_context(hf, 256)
    with pytest.raises(
        UserError, match=rf"=257 is above the model's {ORIGINAL} times the factor=4\.0 of its YaRN, 256"
    ):
        check_context(hf, 257)


def test_a_config_may_say_that_it_is_not_quantized(folder):
    write_config(folder, quantization_config=None, layer_types=["full_attention"] * 2)
    assert read_hf_config(folder).num_hidden_layers == 2


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_yarn_needs_no_head_dim_that_is_null(folder, family):
    write_model(folder / "model", family=family, rope_parameters=YARN | {"rope_theta": 1e6, ORIGINAL: 64})
    path = folder / "model/config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"head_dim": None}))
    hf = read_hf_config(folder / "model")
    assert hf.head_dim == raw["hidden_size"] // raw["num_attention_heads"]
    assert read_rope(folder / "model", hf).inv_freq.shape == (hf.head_dim // 2,)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 1e308}, YARN | {ORIGINAL: 1e308}])
def test_a_context_without_end_is_as_long_as_any_size(folder, rope):
    write_config(folder, rope_scaling=rope)
    with pytest.raises(UserError, match="=100000001 is above the model's"):
        check_context(read_hf_config(folder), 10**8 + 1)


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def test_a_mixtures_sizes_are_read_under_both_names_of_its_experts(folder):
    write_config(folder, **MIXTURE)
    hf = read_hf_config(folder)
    assert (hf.num_experts, hf.num_experts_per_tok, hf.intermediate_size) == (8, 2, 32)
    write_config(folder, **{**MIXTURE, "num_local_experts": 8})
    assert read_hf_config(folder) == hf
    differing = {**MIXTURE, "num_experts": 7, "num_local_experts": 8}
    assert "num_experts=7 and num_local_experts=8 differ; remove one" in refused_config(folder, **differing)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported"),
        ({"num_experts": None}, "num_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_a_mixture_that_the_policy_would_build_otherwise_is_refused(folder, changes, named):
    assert named in refused_config(folder, **{**MIXTURE, **changes})


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"type": "default"}])
def test_unscaled_rope_is_accepted(folder, rope):
    write_config(folder, rope_scaling=rope, hidden_act="silu", use_sliding_window=False, attention_bias=False)
    assert read_hf_config(folder) == HF


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_size_is_named(folder, key):
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != key}))
    with pytest.raises(UserError, match=key):
        read_hf_config(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", None), ("hidden_size", "48"), ("num_attention_heads", "4"), ("num_attention_heads", 0)],
)
def test_a_size_that_is_no_count_is_named(folder, key, value):
    assert key in refused_config(folder, head_dim=None, **{key: value})


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b'"text"', b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_hold_no_json_object_are_named(folder, name, content):
    write_config(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_hf_config(folder)
    assert str(folder) in str(caught.value)
    assert name in str(caught.value)


def test_a_folder_without_config_json_is_named(folder):
    write_config(folder)
    for path in (folder / "nowhere", folder / "config.json"):
        with pytest.raises(UserError) as caught:
            read_hf_config(path)
        assert str(path) in str(caught.value)


# Names


@settings(deadline=None, max_examples=40)
@given(
    groups=st.integers(1, 4),
    heads_per_group=st.integers(1, 4),
    head_dim=st.sampled_from([1, 8, 128]),
    hidden=st.sampled_from([3, 8, 20]),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    family=st.sampled_from(sorted(FAMILIES)),
)
def test_names_round_trip_through_megatron_to_the_bit(groups, heads_per_group, head_dim, hidden, layers, tied, family):
    hf = dataclasses.replace(
        HF,
        family=FAMILIES[family],
        num_experts=3 if FAMILIES[family].experts else 0,
        num_key_value_heads=groups,
        num_attention_heads=groups * heads_per_group,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=5,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
    )
    tensors = random_tensors(hf)
    assert ("lm_head.weight" in tensors) is not tied
    parameters = dict(from_hf(Layout(hf), tensors.__getitem__))
    exported = list(to_hf(Layout(hf), parameters.__getitem__))
    assert sorted(name for name, _ in exported) == sorted(expected_tensors(hf))
    for name, tensor in exported:
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, tensors[name]), name
    assert sum(p.numel() for p in parameters.values()) == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("head_dim", [128, 16])
def test_the_fused_qkv_holds_whole_blocks_of_queries_keys_and_values(head_dim):
    """Each group's queries, then its key and value, where heads are blocks; else all of each."""
    hf = dataclasses.replace(HF, head_dim=head_dim)
    q, kv, h = 4 * head_dim, 2 * head_dim, HF.hidden_size
    tensors = random_tensors(hf)
    rows = {"q": torch.arange(q) + 1000, "k": torch.arange(kv) + 2000, "v": torch.arange(kv) + 3000}
    for x, numbers in rows.items():
        tensors[f"model.layers.1.self_attn.{x}_proj.weight"] = numbers[:, None].expand(-1, h).float().contiguous()
    fused = dict(from_hf(Layout(hf), tensors.__getitem__))["decoder.layers.1.self_attention.linear_qkv.weight"]
    groups = 2 if head_dim == 128 else 1
    by_group = zip(*(numbers.chunk(groups) for numbers in rows.values()), strict=True)
    assert torch.equal(fused[:, 0], torch.cat([part for group in by_group for part in group]).float())
    assert torch.equal(fused, fused[:, :1].expand(-1, h))


def test_the_fused_fc1_holds_the_gate_above_up():
    tensors = random_tensors(HF)
    fused = dict(from_hf(Layout(HF), tensors.__getitem__))["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(fused, torch.cat([gate, up]))


# Tensors


def refused_check(folder, hf: HfConfig = HF) -> str:
    with CheckpointReader(folder) as reader, pytest.raises(UserError) as caught:
        reader.check(expected_tensors(hf))
    return str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_checkpoint_is_read_to_the_bit_from_one_or_many_files(folder, shards, tied):
    hf = dataclasses.replace(HF, tie_word_embeddings=tied)
    tensors = random_tensors(hf)
    names = list(tensors)
    for i in range(shards):
        save_file({name: tensors[name] for name in names[i::shards]}, folder / f"model-{i}-of-{shards}.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    with CheckpointReader(folder) as reader:
        reader.check(expected_tensors(hf))
        assert all(torch.equal(reader.get(name), tensors[name]) for name in names)


def test_a_missing_tensor_is_named(folder):
    tensors = random_tensors(HF)
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "model.layers.1.self_attn.k_norm.weight" in refused_check(folder)


def test_a_shard_left_out_is_named_by_its_tensors(folder):
    tensors = random_tensors(HF)
    save_file({n: t for n, t in tensors.items() if "layers.1" not in n}, folder / "model-1-of-2.safetensors")
    assert "11 tensors, among them model.layers.1." in refused_check(folder)


def test_an_extra_tensor_is_named(folder):
    save_file({**random_tensors(HF), "model.layers.0.mlp.gate.weight": torch.ones(2)}, folder / "model.safetensors")
    assert "model.layers.0.mlp.gate.weight" in refused_check(folder)


def test_a_head_beside_tied_embeddings_is_named(folder):
    save_file(random_tensors(HF), folder / "model.safetensors")
    assert "lm_head.weight" in refused_check(folder, dataclasses.replace(HF, tie_word_embeddings=True))


@pytest.mark.parametrize("shape", [(63, 48), (64, 49), (64 * 48,), (48, 64)])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder, shape):
    save_file({**random_tensors(HF), "lm_head.weight": torch.zeros(shape).bfloat16()}, folder / "model.safetensors")
    said = refused_check(folder)
    assert "lm_head.weight" in said
    assert str(list(shape)) in said
    assert "[64, 48]" in said


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64],
    ids=["I8", "F8_E4M3", "F8_E5M2", "F64"],
)
def test_tensors_that_are_no_weights_as_they_are_are_named(folder, request, dtype):
    """As of a quantized checkpoint whose config.json has lost its quantization_config."""
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**random_tensors(HF), name: torch.ones(40, 48).to(dtype)}, folder / "model.safetensors")
    spelled = request.node.callspec.id
    assert f"{name} is {spelled}; give the bfloat16 checkpoint that it was made from" in refused_check(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_16_and_32_bits_are_taken(folder, dtype):
    save_file({name: tensor.to(dtype) for name, tensor in random_tensors(HF).items()}, folder / "model.safetensors")
    with CheckpointReader(folder) as reader:
        reader.check(expected_tensors(HF))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_a_truncated_file_is_named(folder, keep):
    tensors = random_tensors(HF)
    save_file({n: t for n, t in tensors.items() if "layers.0" in n}, folder / "model-1-of-2.safetensors")
    save_file({n: t for n, t in tensors.items() if "layers.0" not in n}, folder / "model-2-of-2.safetensors")
    broken = folder / "model-2-of-2.safetensors"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(UserError) as caught, CheckpointReader(folder) as reader:
        reader.check(expected_tensors(HF))
    assert str(broken) in str(caught.value)


def test_a_folder_without_safetensors_is_named(folder):
    (folder / "pytorch_model.bin").write_bytes(b"")
    for path in (folder, folder / "nowhere"):
        with pytest.raises(UserError, match=r"\.safetensors") as caught, CheckpointReader(path):
            pass
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_checkpoint_may_carry_its_head_if_it_is_the_embedding(folder, equal):
    """As Qwen3-0.6B does."""
    write_config(folder, tie_word_embeddings=True)
    hf = read_hf_config(folder)
    tensors = random_tensors(hf)
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head if equal else head + 1
    save_file(tensors, folder / "model.safetensors")
    with CheckpointReader(folder) as reader:
        if equal:
            reader.check(expected_tensors(hf))
            assert reader.names == set(expected_tensors(hf))
        else:
            with pytest.raises(UserError, match=r"ties lm_head\.weight"):
                reader.check(expected_tensors(hf))


@pytest.mark.parametrize("differs_at", [None, 0, 15, 16, 49])
def test_a_tied_head_is_compared_some_rows_at_a_time(folder, monkeypatch, differs_at):
    monkeypatch.setattr(checkpoint_reader, "ROWS", 16, raising=False)
    hf, read, get = dataclasses.replace(HF, tie_word_embeddings=True, vocab_size=50), [], CheckpointReader.get
    monkeypatch.setattr(CheckpointReader, "get", lambda *asked: (read.append(get(*asked).shape[0]), get(*asked))[1])
    tensors = random_tensors(hf)
    head = tensors["model.embed_tokens.weight"].float()  # of another dtype, and the same values
    if differs_at is not None:
        head[differs_at, 47] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    with CheckpointReader(folder) as reader:
        if differs_at is None:
            reader.check(expected_tensors(hf))
            assert read == [16] * 6 + [2] * 2
        else:
            with pytest.raises(UserError, match=r"ties lm_head\.weight"):
                reader.check(expected_tensors(hf))
            assert max(read) == 16
