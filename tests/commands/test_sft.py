"""The warm-up trains on the unchanged distribution of the model; the sampling keys of the recipe have no effect."""

import json
import shutil
from itertools import count

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from nemo_fp8rl.commands import sft as module
from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.workers import WorkerDied
from tests.conftest import RECIPES


@pytest.mark.parametrize("sampling", ["policy.generation.top_k=1", "policy.generation.temperature=0.5"])
def test_how_an_engine_samples_changes_nothing(tiny, tmp_path, sampling):
    recipe = [f"policy.model_name={tiny}/model", f"data.train.data_path={tiny}/data.jsonl", "sft.max_num_steps=2"]
    weights = []
    for name, overrides in (("plain", []), ("sampled", [sampling])):
        run = f"logger.log_dir={tmp_path}/run-{name}"
        assert sft(load(RECIPES / "tiny_sft.yaml", [*recipe, run, *overrides]), tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.fixture
def tiny_sft(tiny, tmp_path):
    """Recipes of one step, each with a run directory of its own."""
    recipe = [f"policy.model_name={tiny}/model", f"data.train.data_path={tiny}/data.jsonl", "sft.max_num_steps=1"]
    numbers = count()

    def make(*overrides):
        return load(RECIPES / "tiny_sft.yaml", [*recipe, f"logger.log_dir={tmp_path}/run-{next(numbers)}", *overrides])

    return make


def test_unknown_padding_is_not_embedded(tiny, tiny_sft, tmp_path):
    """`add_special_tokens` without a resize of the embedding leaves such a padding token."""
    shutil.copytree(tiny / "model", tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.add_tokens([f"<{i}>" for i in range(70)])
    tokenizer.add_special_tokens({"pad_token": "<pad beyond>"})
    assert tokenizer.pad_token_id > 64
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert sft(tiny_sft(f"policy.tokenizer.name={tmp_path}/tokenizer"), tmp_path / "padded")
    assert sft(tiny_sft(), tmp_path / "plain")
    padded, plain = (tmp_path / name / "model.safetensors" for name in ("padded", "plain"))
    assert padded.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize(("precision", "tensors"), [("bfloat16", "BF16"), ("float32", "F32")])
def test_config_json_says_what_the_tensors_are(tiny, tiny_sft, tmp_path, precision, tensors):
    """A float16 checkpoint is trained in another dtype; vLLM and transformers serve the one in config.json."""
    shutil.copytree(tiny / "model", tmp_path / "half")
    config = json.loads((tmp_path / "half/config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "half/config.json").write_text(json.dumps(config))
    halves = {name: tensor.half() for name, tensor in load_file(tmp_path / "half/model.safetensors").items()}
    save_file(halves, tmp_path / "half/model.safetensors")
    cfg = tiny_sft(f"policy.model_name={tmp_path}/half", f"policy.precision={precision}", "nemo_fp8rl.flow=bf16")
    assert sft(cfg, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == precision
    with safe_open(tmp_path / "out/model.safetensors", "pt") as opened:
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {tensors}  # noqa: SIM118


def test_an_answer_with_an_unknown_token_is_refused(tiny, tiny_sft, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.add_tokens([f"<{i}>" for i in range(70)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = tmp_path / "data.jsonl"
    lines = (tiny / "data.jsonl").read_text().splitlines()
    data.write_text("\n".join([*lines, '{"prompt": "1+1=", "answer": "<69>"}']))
    keys = (f"policy.tokenizer.name={tmp_path}/tokenizer", f"data.train.data_path={data}")
    with pytest.raises(UserError, match=r"policy\.tokenizer\.name: .* but the model's vocab_size is 64"):
        sft(tiny_sft(*keys, "data.train.split_validation_size=0.01"), tmp_path / "out")


def test_a_dead_rank_is_reported_in_one_sentence(tiny_sft, tmp_path, monkeypatch):
    def die(*_):
        raise WorkerDied("its process ended")

    monkeypatch.setattr(module.MegatronPolicy, "train_step", die)
    with pytest.raises(UserError, match=r"^a training rank died \(its process ended\); .*start again"):
        sft(tiny_sft(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
