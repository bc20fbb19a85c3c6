"""Which weights are FP8, by HF's names and by vLLM's."""

import pytest

from nemo_fp8rl.fp8 import Fp8Layers, scale_name

MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.mark.parametrize("module", [*MODULES, "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.experts.11.up_proj"])
def test_projections_of_the_listed_layers_are_fp8_and_no_others(module):
    layers = Fp8Layers(2, 12)
    for layer, fp8 in ((0, False), (1, False), (2, True), (10, True), (11, True), (12, False), (21, False)):
        name = f"model.layers.{layer}.{module}"
        assert layers.quantizes(name) is fp8
        assert layers.quantizes(name + ".weight") is fp8


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.3.input_layernorm.weight",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.self_attn.q_proj.bias",
        "model.layers.3.self_attn.q_proj.weight_scale_inv",
    ],
)
def test_all_else_stays_in_high_precision(name):
    assert not Fp8Layers(0, 36).quantizes(name)


def test_none_holds_no_layer():
    assert not Fp8Layers.none()
    assert Fp8Layers.none().count == 0
    assert not Fp8Layers.none().quantizes("model.layers.0.mlp.up_proj.weight")
    assert Fp8Layers(0, 2)
    assert Fp8Layers(1, 3).count == 2


def test_scales_are_named_after_their_weight():
    assert scale_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight_scale_inv"
