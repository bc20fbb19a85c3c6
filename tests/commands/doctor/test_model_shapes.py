"""Parameters counted from config.json are those of the checkpoint."""

import json
from math import prod

import pytest

from nemo_fp8rl.commands.doctor.known_models import KNOWN_MODELS
from nemo_fp8rl.commands.doctor.model_shapes import shape_of
from nemo_fp8rl.commands.doctor.models.read_config import from_config
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors

PUBLISHED = {  # as huggingface.co shows them; without a tied head
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "allenai/Llama-3.1-Tulu-3-8B-SFT": 8_030_326_784,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": 70_553_706_496,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Coder-3B": 3_085_938_688,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/QwQ-32B": 32_763_876_352,
    "Qwen/Qwen2-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B-Thinking-2507": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    # DeepSeek-V3's report says 671 B; the bfloat16 checkpoint without its layer of multi-token prediction
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "openai/gpt-oss-20b": 20_914_757_184,
    # Qwen3.5 without vision tower and multi-token prediction: of the 9B's 9,653,104,368 these have 456,010,480 and
    # 243,290,624; of the 35B-A3B's 35,951,822,704 they have 446,571,248 and 844,640,768; of the 397B-A17B's
    # 403,397,928,944 they have 456,010,480 and 6,595,568,128
    "Qwen/Qwen3.5-9B": 9_653_104_368 - 456_010_480 - 243_290_624,
    "Qwen/Qwen3.5-35B-A3B-Base": 35_951_822_704 - 446_571_248 - 844_640_768,
    "Qwen/Qwen3.5-397B-A17B": 403_397_928_944 - 456_010_480 - 6_595_568_128,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8_888_227_328,
    # the index of its shards does not count the biases of 23 routers of 128 experts, which are buffers
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_937_344 + 23 * 128,
    # without its vision tower of 668,684,288
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976 - 668_684_288,
    "Qwen/Qwen2.5-Omni-3B": 3_397_103_616,  # of the thinker's decoder, as the GGUF file counts; its head is not tied
}
ROUNDED = {  # what model cards and reports say, in units of 10^9
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": "12.31",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "121",  # the card says 120, and 12 of them active
    "zai-org/GLM-5.1": "744",  # GLM-5's report; GLM-5.1's 754 have the layer of multi-token prediction
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": "30.5",  # the thinker's
}


@pytest.mark.parametrize(("model", "parameters"), PUBLISHED.items())
def test_published_parameter_counts(model, parameters):
    assert shape_of(model).parameters == parameters


@pytest.mark.parametrize(("model", "billions"), ROUNDED.items())
def test_rounded_parameter_counts(model, billions):
    digits = len(billions.partition(".")[2])
    assert f"{shape_of(model).parameters / 1e9:.{digits}f}" == billions


def test_every_known_model_has_a_published_count_and_layers_that_its_ranks_can_share():
    counts = {*PUBLISHED.values(), 13_015_864_320, 68_976_648_192, 70_553_837_568, 15_960_110_208}
    counts |= {shape_of(model).parameters for model in ROUNDED}
    for name in KNOWN_MODELS:
        shape = shape_of(name)
        assert shape.parameters in counts, name
        assert shape.heads % shape.kv_heads == 0, name


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some/model", r"policy.model_name=some/model is no folder .* knows; give its config.json: --model-c"),
        ("mirror/Llama-3.2-1B-Instruct", r"knows \(did you mean meta-llama/Llama-3.2-1B-Instruct\?\); give"),
        ("Qwen/qwen3-8b-base", r"did you mean Qwen/Qwen3-8B-Base\?"),
        ("/no/such/folder", "is no folder with a config.json"),
    ],
)
def test_an_unknown_model_ends_in_what_to_give(name, message):
    with pytest.raises(UserError, match=message):
        shape_of(name)


def test_a_file_or_its_folder_says_what_the_name_does_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen/Qwen3-4B"]))
    expected = shape_of("Qwen/Qwen3-4B")
    assert shape_of("some/model", tmp_path / "config.json") == shape_of("some/model", tmp_path) == expected
    with pytest.raises(UserError, match=r"--model-config: there is no file .*/none\.json; give the "):
        shape_of("some/model", tmp_path / "none.json")


def test_the_hubs_cache_is_read_without_a_network_and_before_the_table(tmp_path, monkeypatch):
    commit = "0123456789abcdef" * 2 + "01234567"
    cached = {**KNOWN_MODELS["Qwen/Qwen3-4B"], "num_hidden_layers": 7}
    for name in ("Qwen--Qwen3-4B", "some--model"):
        folder = tmp_path / f"hub/models--{name}"
        (folder / f"snapshots/{commit}").mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(commit)
        (folder / f"snapshots/{commit}/config.json").write_text(json.dumps(cached))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert [shape_of(name).layers for name in ("Qwen/Qwen3-4B", "some/model", f"some/model@{commit}")] == [7, 7, 7]
    assert shape_of("Qwen/Qwen3-8B").layers == 36


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
