"""The FP8 weights, by HF's names and by vLLM's."""

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


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("o_proj", ["self_attn.o_proj"]),
        ("q_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"]),
        ("up_proj", ["mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.experts", "mlp.experts.3.down_proj"]),
        ("mlp.down", ["mlp.down_proj"]),
        ("experts", ["mlp.experts", "mlp.experts.0.up_proj", "mlp.experts.12.down_proj"]),
        ("layers.1.", []),
    ],
)
def test_words_keep_whole_matrices_in_high_precision_under_every_name(word, kept):
    layers = Fp8Layers(0, 2, (word,))
    names = [
        *(f"self_attn.{x}_proj" for x in ("q", "k", "v", "o", "qkv")),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down", "gate_up")),
        *("mlp.experts", "mlp.experts.0.up_proj", "mlp.experts.3.down_proj", "mlp.experts.12.down_proj"),
    ]
    every_expert = {name for name in names if "experts" in name} if any("experts" in k for k in kept) else set()
    out = {name for name in names if not layers.quantizes(f"model.layers.0.{name}")}
    assert out == set(kept) | every_expert
    assert out == {name for name in names if not layers.quantizes(f"model.layers.0.{name}.weight")}
    assert layers.quantizes("model.layers.1.self_attn.q_proj") == (word not in ("q_proj", "layers.1."))
