"""`nemo-fp8rl export` in MXFP8 and NVFP4: what it takes from the run, its config and its refusals.

fp8_method/test_exported_formats.py loads its output in vLLM.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.export.convert import export, served_modules
from nemo_fp8rl.commands.tiny_model import make_tiny, write_model
from nemo_fp8rl.fp8 import MXFP8, NVFP4, NVFP4_A16, Format, Fp8Layers, with_lines
from nemo_fp8rl.generation.fp8_method.quantization_config import config_for_vllm_modelopt
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors

WEIGHT = "model.layers.1.mlp.down_proj.weight"
SCALE = WEIGHT + "_scale_2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random Qwen3 of two layers."""
    folder = tmp_path_factory.mktemp("x") / "tiny"
    make_tiny(folder, "add")
    return folder / "model"


@pytest.fixture
def run(checkpoint, tmp_path) -> Path:
    """The checkpoint in the folder of a run in nvfp4_a16 with its own global scales, far from what we would choose."""
    weights = tmp_path / "run" / "checkpoints" / "step_7" / "policy" / "weights"
    shutil.copytree(checkpoint, weights)
    vllm = {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 0, "quantization_ignored_layer_kws": ["o_proj"]}
    ours = {"flow": "nvfp4_a16_e2e", "scale_format": "pow2", "weight_block": "line"}
    recipe = {"policy": {"generation": {"vllm_cfg": vllm}}, "nemo_fp8rl": ours}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(recipe))
    names = [name for name in load_file(checkpoint / "model.safetensors") if name.endswith("proj.weight")]
    (weights.parent / "global_scales").mkdir()
    (weights.parent / "global_scales" / "rank_0.json").write_text(json.dumps(dict.fromkeys(names, 2.0**11)))
    return weights


def refused(capsys, checkpoint: Path, *options: str) -> str:
    """Return the only line on stderr of an export that must fail."""
    output = checkpoint.parent / "refused"
    assert main(["export", "--checkpoint", str(checkpoint), "--output", str(output), *options]) == 2
    assert not output.exists()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def exported(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"], load_file(folder / "model.safetensors")


def test_a_runs_checkpoint_is_exported_by_its_recipe_and_its_global_scales(run, tmp_path, capsys):
    assert main(["export", "--checkpoint", str(run), "--output", str(tmp_path / "out")]) == 0
    assert "1 of 2 layers in NVFP4_A16_1X16, " in capsys.readouterr().out
    config, tensors = exported(tmp_path / "out")
    kept = [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]
    kept += [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert config == {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", *kept, "model.layers.1.self_attn.o_proj"],
        "format": "nvfp4_a16_1x16",
        "scale_format": "pow2",
        "fp8_layers": [1, 2, ["o_proj"]],
    }
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert tensors[SCALE].tolist() == 2.0**-11
    assert not any("input_scale" in name for name in tensors)


def test_options_precede_the_recipe_of_the_run(run, tmp_path):
    options = ["--format", "nvfp4", "--weight-block", "square", "--num-first-layers-in-bf16", "0"]
    command = ["export", "--checkpoint", str(run), "--output", str(tmp_path / "out"), *options]
    assert main([*command, "--quantization-ignored-layer-kws", "q_proj"]) == 0
    config, tensors = exported(tmp_path / "out")
    assert (config["quant_algo"], config["format"]) == ("NVFP4", "nvfp4_1x16")
    assert config["fp8_layers"] == [0, 2, ["q_proj"]]
    scales = tensors[WEIGHT + "_scale"].view(torch.uint8)
    assert torch.equal(scales[0::16], scales[15::16])  # of square blocks
    assert tensors[SCALE].tolist() == 2.0**-11


def test_without_a_run_fused_weights_get_the_global_scale_a_trainer_would_choose(checkpoint, tmp_path):
    export(checkpoint, tmp_path / "out", format="nvfp4")
    _, tensors = exported(tmp_path / "out")
    source = load_file(checkpoint / "model.safetensors")
    for layer in range(2):
        for part, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            fused = [f"model.layers.{layer}.{part}.{name}_proj.weight" for name in names]
            amax = max(source[name].abs().max().item() for name in fused)
            (scale,) = {tensors[f"{name}_scale_2"].item() for name in fused}
            # room for four more binades, and at most one wasted by the power of two
            assert 2**4 <= 2688 * scale / amax < 2**5


def test_float32_scales_follow_the_weights_and_not_the_run(run, tmp_path):
    export(run, tmp_path / "out", scale_format="fp32")
    _, tensors = exported(tmp_path / "out")
    amax = load_file(run / "model.safetensors")[WEIGHT].float().abs().max()
    assert tensors[SCALE].item() == pytest.approx(amax.item() / 2688, rel=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("format", [MXFP8, NVFP4, NVFP4_A16, with_lines(NVFP4)], ids=lambda format: format.name)
def test_vllms_own_config_finds_exactly_our_quantized_layers(family, format: Format, tmp_path):
    """vLLM also leaves out a module whose name contains a listed one."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config, ModelOptNvFp4Config

    write_model(tmp_path / "model", 0, family, num_hidden_layers=12)
    layers = Fp8Layers(2, 11, ("k_proj", "layers.5.mlp"))
    linears = served_modules(expected_tensors(read_hf_config(tmp_path / "model")))
    block = config_for_vllm_modelopt(linears, "pow2", layers, format)
    takers = (ModelOptMxFp8Config, ModelOptNvFp4Config)
    (name,) = filter(None, (taker.override_quantization_method(block, None) for taker in takers))
    config = get_quantization_config(name).from_config(block)
    config.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    mlp = ("mlp.gate", "mlp.experts") if family == "qwen3_moe" else ("mlp.gate_up_proj", "mlp.down_proj")
    modules = [f"model.layers.{i}.{x}" for i in range(12) for x in ("self_attn.qkv_proj", "self_attn.o_proj", *mlp)]
    for module in ("lm_head", *modules):
        assert config.is_layer_excluded(module) == (not layers.quantizes(module)), module


def test_what_cannot_be_is_refused(checkpoint, run, capsys, tmp_path):
    assert "--format fp4: choose one of fp8, mxfp8, nvfp4, nvfp4_a16" in refused(capsys, checkpoint, "--format", "fp4")
    assert "--weight-block row: choose one of square, line" in refused(capsys, checkpoint, "--weight-block", "row")
    assert "vLLM reads fp8 in blocks of 128x128" in refused(capsys, checkpoint, "--weight-block", "line")
    scales = run.parent / "global_scales" / "rank_0.json"
    saved = json.loads(scales.read_text())
    scales.write_text(json.dumps({name: scale for name, scale in saved.items() if name != WEIGHT}))
    assert f"lacks the global scale of {WEIGHT}" in refused(capsys, run)
    scales.write_text(json.dumps(saved | {WEIGHT: 3.0}))
    assert "is no power of two: the run's nemo_fp8rl.scale_format was fp32" in refused(capsys, run)
    scales.write_text("{")
    assert "global_scales cannot be read" in refused(capsys, run)
    recipe = run.parents[3] / "config.yaml"
    recipe.write_text("- 1")
    assert f"{recipe}, the recipe of the run, cannot be read" in refused(capsys, run)


@pytest.mark.parametrize(
    ("format", "keys", "message"),
    [
        ("mxfp8", {"intermediate_size": 528}, "no MXFP8 form: its intermediate_size=528 is not a multiple of 32"),
        ("nvfp4", {"hidden_size": 72}, "no NVFP4 form: its hidden_size=72 is not a multiple of 16"),
    ],
)
def test_sizes_that_do_not_fit_the_blocks_are_refused(checkpoint, tmp_path, capsys, format, keys, message):
    shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text()) | keys
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert message in refused(capsys, tmp_path / "model", "--format", format)
