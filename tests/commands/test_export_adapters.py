"""`nemo-fp8rl export` of a run's adapters: merged into their base, or beside it.

generation/fp8_method/test_exported_adapters.py serves the output in vLLM.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.hf.adapter_folder import CONFIG, WEIGHTS
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.refit.sender.checkpoint_form import to_checkpoint_form
from tests.conftest import RECIPES, SMALL

BLOCK = "policy.megatron_cfg.peft"


def save_adapters(folder: Path, family: str, *overrides: str) -> Path:
    """The adapters of a run in `folder`/run with its recipe, as a run leaves them; the base is `folder`/tiny/model."""
    make_tiny(folder / "tiny", "add", 0, family)
    paths = (f"policy.model_name={folder}/tiny/model", f"data.train.data_path={folder}/tiny/data.jsonl")
    keys = (f"{BLOCK}.enabled=true", f"{BLOCK}.lora_B_init_method=kaiming", f"logger.log_dir={folder}/run")
    cfg = load(RECIPES / "tiny_cpu.yaml", [*paths, *SMALL, *keys, *overrides])
    worker = MegatronWorker()
    worker.setup(cfg, 0, 1, None)
    policy = folder / "run/checkpoints/step_3/policy"
    policy.mkdir(parents=True)
    worker.save(str(policy))
    (folder / "run/config.yaml").write_text(yaml.safe_dump({"nemo_fp8rl": {"flow": cfg.nemo_fp8rl.flow}}))
    return policy / "adapter"


@pytest.fixture(scope="module")
def of_bf16(tmp_path_factory) -> Path:
    return save_adapters(tmp_path_factory.mktemp("bf16"), "qwen3", "nemo_fp8rl.flow=bf16")


@pytest.fixture(scope="module")
def of_fp8(tmp_path_factory) -> Path:
    return save_adapters(tmp_path_factory.mktemp("fp8"), "qwen3", "nemo_fp8rl.flow=fp8_e2e")


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory) -> Path:
    return save_adapters(tmp_path_factory.mktemp("moe"), "qwen3_moe", "nemo_fp8rl.flow=bf16")


def base_of(adapter: Path) -> Path:
    return adapter.parents[4] / "tiny/model"


def run_export(adapter: Path, output: Path, *options: str) -> int:
    return main(["export", "--checkpoint", str(adapter), "--output", str(output), *options])


def merged_by_formula(adapter: Path) -> dict[str, torch.Tensor]:
    weights, tensors = load_file(base_of(adapter) / "model.safetensors"), load_file(adapter / WEIGHTS)
    for name, weight in weights.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in tensors:
            a, b = (tensors[f"{prefix}.lora_{x}.weight"].float() for x in "AB")
            weights[name] = (weight.float() + b @ a * 4.0).bfloat16()  # alpha 32 over rank 8
    return weights


@pytest.mark.parametrize("kind", ["of_bf16", "of_experts"])
def test_a_merged_weight_is_the_sum_rounded_once(request, tmp_path, kind):
    adapter = request.getfixturevalue(kind)
    assert run_export(adapter, tmp_path / "merged", "--merge") == 0
    merged, base = load_file(tmp_path / "merged/model.safetensors"), load_file(base_of(adapter) / "model.safetensors")
    expected = merged_by_formula(adapter)
    assert merged.keys() == expected.keys() == base.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {path.name for path in base_of(adapter).iterdir()}
    assert (tmp_path / "merged/config.json").read_text() == (base_of(adapter) / "config.json").read_text()


def test_the_merged_model_is_that_of_peft(of_bf16, tmp_path):
    assert run_export(of_bf16, tmp_path / "merged", "--merge") == 0
    ids = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(base_of(of_bf16), dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids).logits
        expected = PeftModel.from_pretrained(base, str(of_bf16))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    assert (merged - expected).abs().max() < 0.05 * (plain - expected).abs().max()  # weights have 8 bits


def test_merged_weights_are_quantized_as_the_run_says(of_fp8, tmp_path):
    assert run_export(of_fp8, tmp_path / "fp8", "--merge") == 0
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in merged_by_formula(of_fp8).items():
        expected |= to_checkpoint_form(name, tensor, Fp8Layers(0, 2), "pow2")
    exported = load_file(tmp_path / "fp8/model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name].float(), expected[name].float()) for name in exported)


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_adapters_beside_a_base_are_those_of_the_run(of_fp8, tmp_path, capsys, format):
    options = ("--format", format)
    assert run_export(base_of(of_fp8), tmp_path / "base", *options) == 0
    assert run_export(of_fp8, tmp_path / "both", *options) == 0
    command = (
        f"vllm serve {tmp_path}/both --enable-lora --max-lora-rank 8 --lora-modules policy={tmp_path}/both/adapter"
    )
    assert command in capsys.readouterr().out
    for path in (tmp_path / "base").iterdir():
        assert (tmp_path / "both" / path.name).read_bytes() == path.read_bytes()
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "both/adapter" / name).read_bytes() == (of_fp8 / name).read_bytes()


def test_global_scales_of_the_bases_own_run_are_not_taken(of_fp8, tmp_path):
    """A run with adapters chooses the scales of its base anew, whatever the run that trained the base saved."""
    shutil.copytree(base_of(of_fp8), tmp_path / "policy/weights")
    scales = {name: 2.0**-3 for name in load_file(tmp_path / "policy/weights/model.safetensors")}
    (tmp_path / "policy/global_scales").mkdir()
    (tmp_path / "policy/global_scales/rank_0.json").write_text(json.dumps(scales))
    shutil.copytree(of_fp8, tmp_path / "adapter")
    config = json.loads((of_fp8 / CONFIG).read_text()) | {"base_model_name_or_path": f"{tmp_path}/policy/weights"}
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config))
    assert run_export(tmp_path / "adapter", tmp_path / "moved", "--format", "nvfp4") == 0
    assert run_export(of_fp8, tmp_path / "first", "--format", "nvfp4") == 0
    name = "model.safetensors"
    assert (tmp_path / "moved" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


@pytest.fixture
def refused(capsys, tmp_path) -> Callable[..., str]:
    def run(adapter: Path, *options: str) -> str:
        assert run_export(adapter, tmp_path / "new", *options) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and not (tmp_path / "new").exists()
        return error

    return run


def test_what_cannot_be_exported_is_refused(of_bf16, of_experts, of_fp8, refused, tmp_path):
    message = refused(of_bf16)
    assert f"--enable-lora --lora-modules policy={of_bf16}, or give --merge, or --format to quantize" in message
    assert "--format bf16 needs --merge" in refused(of_bf16, "--format", "bf16")
    assert "has adapters of experts" in refused(of_experts, "--format", "fp8")
    assert "--merge: --checkpoint" in refused(base_of(of_fp8), "--merge")
    run = of_fp8.parents[3]
    assert f"export --checkpoint {of_fp8} --merge --format bf16` makes one" in refused(run)
    shutil.copytree(of_fp8, tmp_path / "copy")
    (tmp_path / "copy" / WEIGHTS).unlink()
    assert "cannot be read as adapters" in refused(tmp_path / "copy")
    config = json.loads((of_fp8 / CONFIG).read_text()) | {"base_model_name_or_path": f"{tmp_path}/gone"}
    (tmp_path / "copy" / CONFIG).write_text(json.dumps(config))
    assert f"base_model_name_or_path={tmp_path}/gone is no HF checkpoint folder" in refused(tmp_path / "copy")
    shutil.copyfile(of_fp8 / WEIGHTS, tmp_path / "copy" / WEIGHTS)
    shutil.copytree(base_of(of_bf16), tmp_path / "other")
    weights = load_file(tmp_path / "other/model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "other/model.safetensors")
    config["base_model_name_or_path"] = f"{tmp_path}/other"
    (tmp_path / "copy" / CONFIG).write_text(json.dumps(config))
    assert "has adapters of another base" in refused(tmp_path / "copy")
