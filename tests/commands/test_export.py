"""`nemo-fp8rl export`: its output folder and its refusals. fp8_method/test_exported.py loads the output in vLLM."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nemo_fp8rl.commands.export.convert
from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.export.convert import export, served_modules
from nemo_fp8rl.commands.tiny_model import make_tiny, write_model
from nemo_fp8rl.common.atomic_files import LOCK
from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.generation.fp8_method.quantization_config import config_for_vllm_fp8
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.hf.storage.shard_writer import ShardWriter
from nemo_fp8rl.refit.sender.checkpoint_form import to_checkpoint_form

WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random Qwen3 of two layers."""
    folder = tmp_path_factory.mktemp("x") / "tiny"
    make_tiny(folder, "add")
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 1}')
    return folder / "model"


@pytest.fixture
def modified_copy(checkpoint, tmp_path_factory) -> Callable[..., Path]:
    """modified_copy(tensors, **keys) returns a copy of the checkpoint with these tensors (None removes) and keys."""

    def make(tensors: dict[str, torch.Tensor | None] | None = None, **keys: object) -> Path:
        folder = tmp_path_factory.mktemp("x") / "model"
        shutil.copytree(checkpoint, folder)
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))
        all_tensors = load_file(folder / "model.safetensors") | (tensors or {})
        save_file({n: t for n, t in all_tensors.items() if t is not None}, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def refused_message(capsys, tmp_path) -> Callable[..., str]:
    """refused_message(checkpoint, *options) returns the only line on stderr of an export that must fail."""

    def run(checkpoint: Path, *options: str) -> str:
        parent = tmp_path / "refused"
        parent.mkdir(exist_ok=True)
        code = main(["export", "--checkpoint", str(checkpoint), "--output", str(parent / "fp8"), *options])
        err = capsys.readouterr().err
        assert code == 2
        assert err.startswith("nemo-fp8rl: ")
        assert err.count("\n") == 1
        assert not list(parent.iterdir())
        return err

    return run


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def are_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
        for name in a
    )


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_the_folder_is_an_hf_checkpoint_with_a_refits_tensors(checkpoint, tmp_path, scale_format):
    output = tmp_path / "new" / "fp8"
    command = ["export", "--checkpoint", str(checkpoint), "--output", str(output), "--scale-format", scale_format]
    assert main([*command, "--num-first-layers-in-bf16", "1"]) == 0
    source = load_file(checkpoint / "model.safetensors")
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in source.items():
        expected |= to_checkpoint_form(name, tensor, Fp8Layers(1, 2), scale_format)
    assert are_same(read_tensors(output), expected)
    before = {path.name for path in checkpoint.iterdir()}
    assert {path.name for path in output.iterdir()} == before
    for name in before - {"config.json", "model.safetensors"}:
        assert (output / name).read_bytes() == (checkpoint / name).read_bytes()
    config = json.loads((output / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_format": scale_format,
        "fp8_layers": [1, 2, []],
        "modules_to_not_convert": [
            "lm_head",
            *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"),
            *(f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")),
        ],
    }
    assert config == json.loads((checkpoint / "config.json").read_text())
    assert [path.name for path in output.parent.iterdir()] == ["fp8"]


def test_files_outside_the_tokenizer_are_not_copied(checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "my_access_token.json").write_text("secret")
    (copy / "vocab.pickle").write_text("")
    assert main(["export", "--checkpoint", str(copy), "--output", str(tmp_path / "fp8")]) == 0
    assert not {"my_access_token.json", "vocab.pickle"} & {path.name for path in (tmp_path / "fp8").iterdir()}


def test_transformers_reads_the_config(checkpoint, tmp_path):
    from transformers import AutoConfig, AutoTokenizer
    from transformers.quantizers.auto import AutoQuantizationConfig

    export(checkpoint, tmp_path / "fp8")
    config = AutoConfig.from_pretrained(tmp_path / "fp8")
    assert config.model_type == "qwen3"
    quantization = AutoQuantizationConfig.from_dict(config.quantization_config)
    assert quantization.quant_method == "fp8"
    assert quantization.modules_to_not_convert == ["lm_head"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "fp8")("12+34=").input_ids) == 6


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_vllms_own_config_finds_exactly_our_fp8_layers(family, tmp_path):
    """With twelve layers, the name of layer 1 is a prefix of those of layers 10 and 11."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    write_model(tmp_path / "model", 0, family, num_hidden_layers=12)
    layers = Fp8Layers(2, 11, ("k_proj", "layers.5.mlp"))
    linears = served_modules(expected_tensors(read_hf_config(tmp_path / "model")))
    config = Fp8Config.from_config(config_for_vllm_fp8(linears, "pow2", layers))
    assert (config.is_checkpoint_fp8_serialized, config.activation_scheme) == (True, "dynamic")
    assert config.weight_block_size == [128, 128]
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    mlp = ("mlp.gate", "mlp.experts") if family == "qwen3_moe" else ("mlp.gate_up_proj", "mlp.down_proj")
    modules = [f"model.layers.{i}.{x}" for i in range(12) for x in ("self_attn.qkv_proj", "self_attn.o_proj", *mlp)]
    for module in ("lm_head", *modules):
        assert is_layer_skipped(module, config.ignored_layers, fused) == (not layers.quantizes(module)), module


def test_a_mixture_of_many_files_holds_the_same_tensors(tmp_path, monkeypatch):
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3_moe")
    export(tmp_path / "tiny" / "model", tmp_path / "one")
    monkeypatch.setattr(nemo_fp8rl.commands.export.convert, "ShardWriter", partial(ShardWriter, file_bytes=300_000))
    export(tmp_path / "tiny" / "model", tmp_path / "many")
    assert are_same(read_tensors(tmp_path / "many"), read_tensors(tmp_path / "one"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    sizes = 0
    for name in files:
        with safe_open(tmp_path / "many" / name, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        assert {key for key, file in index["weight_map"].items() if file == name} == tensors.keys()
        sizes += sum(tensor.nbytes for tensor in tensors.values())
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 300_000
    assert index["metadata"]["total_size"] == sizes
    with CheckpointReader(tmp_path / "many") as reader:  # it refuses a name that occurs twice
        assert reader.dtype("model.norm.weight") == "BF16"


def test_an_empty_output_folder_is_taken_and_a_full_one_is_not(checkpoint, tmp_path, refused_message, capsys):
    (tmp_path / "fp8").mkdir()
    assert export(checkpoint, tmp_path / "fp8")
    bytes_before = (tmp_path / "fp8" / "model.safetensors").read_bytes()
    code = main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "fp8")])
    assert (code, capsys.readouterr().err.count("exists already; give a new folder")) == (2, 1)
    assert (tmp_path / "fp8" / "model.safetensors").read_bytes() == bytes_before
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(checkpoint)]) == 2
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(checkpoint / "config.json")]) == 2
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(checkpoint / "config.json" / "x")]) == 2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({WEIGHT: None}, f"lacks the tensor {WEIGHT}"),
        ({"model.extra": torch.ones(1)}, "holds the tensor model.extra, which config.json does not describe"),
        ({"model.norm.weight": torch.ones(128)}, "model.norm.weight is F32, only bfloat16 is exported"),
        (
            {WEIGHT: torch.ones(128, 512).to(torch.float8_e4m3fn)},
            f"{WEIGHT} is F8_E4M3; give the bfloat16 checkpoint that it",
        ),
        ({WEIGHT: torch.ones(128, 256).bfloat16()}, f"{WEIGHT} has shape [128, 256]"),
        ({WEIGHT: torch.full((128, 512), torch.nan).bfloat16()}, f"{WEIGHT}: 65536 of 65536 values are not finite"),
        ({"model.norm.weight": torch.full((128,), torch.inf).bfloat16()}, "model.norm.weight: 128 of 128 values"),
    ],
)
def test_tensors_that_cannot_be_exported_are_named(modified_copy, refused_message, tensors, message):
    assert message in refused_message(modified_copy(tensors))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "(quant_method fp8); give the bfloat16 checkpoint",
        ),
        ({"intermediate_size": 500}, "intermediate_size=500 is not a multiple of 128"),
        ({"head_dim": 96}, "num_key_value_heads * head_dim=192 is not a multiple of 128"),
        ({"head_dim": 96}, "keep that in bfloat16 by --quantization-ignored-layer-kws q_proj, or"),
        ({"hidden_size": 192}, "hidden_size=192 is not a multiple of 128"),
        ({"hidden_size": "x"}, "hidden_size must be a whole number"),
    ],
)
def test_models_that_cannot_be_exported_are_refused_by_key(modified_copy, refused_message, keys, message):
    assert message in refused_message(modified_copy(**keys))


def test_options_and_folders_that_cannot_be_are_refused(checkpoint, modified_copy, refused_message, tmp_path):
    assert "--scale-format e8m0: choose one of pow2, fp32" in refused_message(checkpoint, "--scale-format", "e8m0")
    for options in (["--num-first-layers-in-bf16", "2"], ["--num-last-layers-in-bf16", "-1"]):
        assert "must leave an FP8 layer of the model's 2" in refused_message(checkpoint, *options)
    assert f"--checkpoint {tmp_path} has no config.json" in refused_message(tmp_path)
    (tmp_path / "run/checkpoints/step_3/policy/weights").mkdir(parents=True)
    assert f"{tmp_path}/run/checkpoints/step_3/policy/weights" in refused_message(tmp_path / "run")
    damaged = modified_copy()
    (damaged / "tokenizer.json").unlink()
    (damaged / "tokenizer.json").mkdir()
    assert "tokenizer.json cannot be read (Is a directory); mend it" in refused_message(damaged)
    (damaged / "model.safetensors").write_bytes(b"x" * 100)
    assert "is not a whole safetensors file" in refused_message(damaged)
    (damaged / "model.safetensors").unlink()
    assert "has no .safetensors file" in refused_message(damaged)
    (damaged / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused_message(damaged)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(checkpoint, refused_message, monkeypatch):
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert "1.0 kB are free there, the export takes" in refused_message(checkpoint)

    def full(self, name, tensor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardWriter, "write", full)
    assert "No space left on device); make room" in refused_message(checkpoint)


def test_another_export_at_work_is_left_alone(checkpoint, tmp_path, capsys):
    partial_folder = tmp_path / ".fp8.partial"
    partial_folder.mkdir()
    (partial_folder / "begun").touch()
    guard = os.open(partial_folder / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(guard, fcntl.LOCK_EX)
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "fp8")]) == 2
    assert "another process works in" in capsys.readouterr().err
    assert (partial_folder / "begun").exists()
    os.close(guard)
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "fp8")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8"]


def test_ctrl_c_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(nemo_fp8rl.commands.export.convert, "to_checkpoint_form", interrupt)
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "fp8")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


KILLED_EXPORT = """
import os, signal, sys
import nemo_fp8rl.commands.export.convert as export
to_checkpoint_form = export.to_checkpoint_form
def kill_at_layer_1(name, *args):
    if name.startswith("model.layers.1"):
        os.kill(os.getpid(), signal.SIGKILL)
    return to_checkpoint_form(name, *args)
export.to_checkpoint_form = kill_at_layer_1
from nemo_fp8rl.cli import main
main(sys.argv[1:])
"""


def test_the_next_export_cleans_up_after_a_kill(checkpoint, tmp_path):
    command = ["export", "--checkpoint", str(checkpoint), "--output", str(tmp_path / "fp8")]
    assert subprocess.run([sys.executable, "-c", KILLED_EXPORT, *command], check=False).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".fp8.partial"]
    assert main(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]
    assert len(read_tensors(tmp_path / "fp8")) == len(expected_tensors(read_hf_config(checkpoint))) + 14


def test_words_keep_layers_in_bfloat16(checkpoint, tmp_path, refused_message):
    assert export(checkpoint, tmp_path / "fp8", ignored_layer_kws=["o_proj"])
    tensors = read_tensors(tmp_path / "fp8")
    assert tensors["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn
    bf16_modules = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"][
        "modules_to_not_convert"
    ]
    assert bf16_modules == ["lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert "'o_prj' is in the name of no FP8 layer" in refused_message(
        checkpoint, "--quantization-ignored-layer-kws", "o_prj"
    )
