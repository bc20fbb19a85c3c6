"""Parameters counted from config.json are those of the checkpoint."""

import json
from math import prod

import pytest

from nemo_fp8rl.commands.doctor.model_shapes import KNOWN_MODELS, from_config, shape_of
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors


@pytest.mark.parametrize(
    ("model", "parameters"),
    [  # as huggingface.co shows them
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
    ],
)
def test_published_parameter_counts(model, parameters):
    assert shape_of(model).parameters == parameters


def test_a_revision_of_a_published_model_has_its_sizes():
    assert shape_of(f"Qwen/Qwen3-8B-Base@{'0' * 40}") == shape_of("Qwen/Qwen3-8B-Base")
    with pytest.raises(UserError, match=r"policy\.model_name=some/model@main is no folder"):
        shape_of("some/model@main")


def test_moonlight_without_embedding_and_head_as_its_model_card_counts():
    shape = shape_of("moonshotai/Moonlight-16B-A3B")
    assert f"{(shape.parameters - 2 * shape.embedding().elements) / 1e9:.2f}" == "15.29"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_checkpoint_of_ours_has_these_tensors(tmp_path, family):
    write_model(tmp_path / "model", seed=0, family=family)
    tensors = expected_tensors(read_hf_config(tmp_path / "model"))
    shape = shape_of(str(tmp_path / "model"))
    assert shape.parameters == sum(prod(size) for size in tensors.values())
    weights = [shape.embedding(), *shape.head(), *(w for i in range(shape.layers) for w in shape.layer(i))]
    of_experts = {
        name.replace(".experts.0.", ".experts.*.") for name in tensors if ".experts." not in name or ".0." in name
    }
    assert {weight.name for weight in weights} >= {name for name in of_experts if ".experts." not in name}
    assert len({weight.name for weight in weights}) == len(weights)


def test_an_unknown_model_is_to_be_given_as_a_folder():
    with pytest.raises(UserError, match=r"policy.model_name=some/model is no folder .* give it as policy.model_name="):
        shape_of("some/model")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "does not know model_type 'gpt2'"),
        ({"model_type": "llama", "num_attention_heads": 4, "hidden_size": 8}, "lacks vocab_size"),
    ],
)
def test_a_config_that_does_not_say_enough(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        shape_of(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["[]", "null", "{", "[" * 100_000, '{"model_type": []}'], ids=["list", "null", "cut", "deep", "type"]
)
def test_a_config_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=str(tmp_path)):
        shape_of(str(tmp_path))


MAY_LACK = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts", "n_shared_experts")
MAY_BE_0 = ("n_routed_experts", "num_experts", "n_shared_experts", "first_k_dense_replace")


@pytest.mark.parametrize("value", ["12", None, [1], 0, -1, 1.5, True, 10**30], ids=str)
@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "moonshotai/Moonlight-16B-A3B", "Qwen/Qwen3-30B-A3B"])
def test_a_size_that_is_no_number_of_its_range_is_named(model, value):
    config = KNOWN_MODELS[model]
    sizes = [key for key, size in config.items() if type(size) is int]
    if value is None:
        sizes = [key for key in sizes if key not in (*MAY_LACK, "first_k_dense_replace", "intermediate_size")]
    if value == 0:
        sizes = [key for key in sizes if key not in MAY_BE_0]
    assert sizes
    for key in sizes:
        with pytest.raises(UserError, match=key):
            from_config({**config, key: value}, "x")


def test_the_first_layers_of_a_mixture_may_be_dense():
    shape = shape_of("moonshotai/Moonlight-16B-A3B")
    assert not any(weight.of_expert for weight in shape.layer(0))
    assert sum(weight.elements for weight in shape.layer(1) if weight.of_expert) == 64 * 3 * 2048 * 1408
    assert from_config({**MINIMAL, "tie_word_embeddings": True}, "x").parameters == 8 * 4 + 4 + LAYER


MINIMAL = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
LAYER = 2 * 4 + 4 * 4 + 2 * (2 * 4) + 4 * 4 + 3 * (6 * 4)  # norms; q, k and v, o; gate, up, down
