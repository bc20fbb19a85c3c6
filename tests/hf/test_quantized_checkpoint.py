"""A quantized checkpoint is refused with its format, and with what an engine would do wrong with it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from nemo_fp8rl.commands.parity import mxfp8_formulas
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import MXFP8, NVFP4, BlockScaled, quantize_blockwise, with_lines
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.quantized_checkpoint import check_rules
from tests.hf.test_hf_files import write_config

LAYER = "model.layers.0.self_attn."
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("x")


def weight(seed: int = 0, kind: str = "normal") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 256, generator=generator) * 0.02
    if kind == "heavy-tailed":
        x = x / (torch.randn(3, 64, 256, generator=generator).square().mean(0)).sqrt()
    return x.bfloat16()


def write(folder, tensors: dict[str, BlockScaled], file: str = "model.safetensors") -> None:
    parts = {}
    for name, x in tensors.items():
        parts[name], parts[x.format.scale_name(name)] = x.data, x.scale_inv
        if x.global_scale is not None:
            parts[x.format.global_name(name)] = x.global_scale
    save_file(parts, folder / file)


def refused(folder, **changes) -> str:
    write_config(folder, **changes)
    with pytest.raises(UserError) as caught:
        read_hf_config(folder)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed"])
def test_mxfp8_with_scales_rounded_down_is_refused_by_its_rule(folder, kind):
    name = LAYER + "q_proj.weight"
    write(folder, {name: mxfp8_formulas.ocp(weight(kind=kind), (1, 32), "pow2")})
    said = refused(folder, quantization_config=MODELOPT)
    assert str(folder / "model.safetensors") in said
    assert name in said
    assert "rule of OCP's specification, which rounds scales down" in said
    assert "give the bfloat16 checkpoint" in said


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed"])
@pytest.mark.parametrize("rule", ["1x32", "32x32", "compressed-tensors"])
def test_mxfp8_with_scales_rounded_up_is_refused_for_being_quantized_alone(folder, rule, kind):
    for seed in range(20):
        x = weight(seed, kind)
        quantized = {
            "1x32": lambda x: quantize_blockwise(x, format=with_lines(MXFP8)),
            "32x32": lambda x: quantize_blockwise(x, format=MXFP8),
            "compressed-tensors": lambda x: mxfp8_formulas.compressed_tensors(x, (1, 32), "pow2"),
        }[rule](x)
        write(folder, {LAYER + "q_proj.weight": quantized})
        check_rules(folder)
    said = refused(folder, quantization_config=MODELOPT)
    assert "is already quantized (MXFP8, quant_method modelopt); give the bfloat16 checkpoint" in said


def test_nvfp4_with_different_globals_in_a_fused_layer_is_refused(folder):
    """Also where the projections are in different files."""
    names = [LAYER + f"{part}_proj.weight" for part in "qk"]
    for number, (name, scale) in enumerate(zip(names, (1.0, 1.25), strict=True)):
        x = quantize_blockwise(weight(number) * scale, format=with_lines(NVFP4), scale_format="fp32")
        write(folder, {name: x}, f"model-{number}.safetensors")
    said = refused(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert "NVFP4 with different global scales in one fused layer (" + LAYER + "q_proj " in said
    assert str(folder / "model-0.safetensors") in said


def test_nvfp4_with_one_global_is_refused_for_being_quantized_alone(folder):
    encode = torch.tensor(2.0**14)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    tensors = {
        f"model.layers.0.{part}.weight": quantize_blockwise(
            weight(), format=NVFP4, encode=encode * (1 + (part == "mlp.down_proj"))
        )
        for part in parts
    }
    write(folder, tensors)
    said = refused(folder, quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})
    assert "is already quantized (nvfp4-pack-quantized, quant_method compressed-tensors)" in said


def test_the_format_in_a_file_of_its_own_is_named(folder):
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert "has hf_quant_config.json, by which vLLM takes it for quantized (NVFP4)" in refused(folder)


def test_a_damaged_file_does_not_hide_that_the_checkpoint_is_quantized(folder):
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert "is already quantized" in refused(folder, quantization_config=MODELOPT)
