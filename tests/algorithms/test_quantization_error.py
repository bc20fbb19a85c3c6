"""Errors of quantized weights against the quantizer's own bytes, summed here weight by weight in float64."""

import math

import pytest
import torch

from nemo_fp8rl.algorithms.quantization_error import weight_error, weight_squares
from nemo_fp8rl.fp8 import Fp8Layers, NonFiniteError, quantize_blockwise

FORMATS = ["pow2", "fp32"]


def checkpoint(layers: int = 3) -> list[tuple[str, torch.Tensor]]:
    """Some names and shapes of a Qwen3 checkpoint; the largest weight has more rows than are quantized at once."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    weights = [("model.embed_tokens.weight", normal(300, 96)), ("model.norm.weight", normal(96))]
    for i in range(layers):
        weights += [
            (f"model.layers.{i}.self_attn.q_proj.weight", normal(160, 96) * (i + 1)),
            (f"model.layers.{i}.mlp.up_proj.weight", normal(1100, 96)),
            (f"model.layers.{i}.mlp.experts.gate_proj.weight", normal(3, 130, 96)),
            (f"model.layers.{i}.input_layernorm.weight", normal(96)),
        ]
    return weights


def expected(weights, fp8_layers, scale_format) -> dict[str, float]:
    """Group by group, each weight quantized whole."""

    def relative(group) -> float:
        error = norm = 0.0
        for name, weight in group:
            held = weight.double()
            if fp8_layers.quantizes(name):
                held = quantize_blockwise(weight, scale_format=scale_format).dequantize(torch.float64)
            error += float((held - weight.double()).square().sum())
            norm += float(weight.double().square().sum())
        return math.sqrt(error / norm)

    groups = {"fp8": [w for w in weights if fp8_layers.quantizes(w[0])]}
    groups["bf16"] = [w for w in weights if not fp8_layers.quantizes(w[0])]
    groups |= {f"layer_{i}": [w for w in weights if f"layers.{i}." in w[0]] for i in range(3)}
    return {f"weight_error/{name}": relative(group) for name, group in groups.items() if group}


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("fp8_layers", [Fp8Layers(0, 3), Fp8Layers(1, 2), Fp8Layers.none()])
def test_errors_by_precision_and_layer_are_those_of_the_quantizers_bytes(fp8_layers, scale_format):
    weights = checkpoint()
    errors = weight_error([weight_squares(iter(weights), fp8_layers, scale_format)])
    assert errors == pytest.approx(expected(weights, fp8_layers, scale_format), rel=1e-6)


def test_fp8_weights_are_off_by_two_percent_and_bf16_weights_by_nothing():
    errors = weight_error([weight_squares(checkpoint(), Fp8Layers(1, 3))])
    assert 0.01 < errors["weight_error/fp8"] < 0.04
    assert errors["weight_error/bf16"] == errors["weight_error/layer_0"] == 0.0
    assert errors["weight_error/layer_1"] > 0.01


def test_ranks_that_hold_parts_of_the_weights_give_the_error_of_all():
    weights = checkpoint()
    whole = weight_error([weight_squares(weights, Fp8Layers(1, 3))])
    ranks = [weight_squares(weights[i::3], Fp8Layers(1, 3)) for i in range(3)]
    assert weight_error(ranks) == pytest.approx(whole, rel=1e-12)


def test_weights_that_are_all_zero_have_no_error():
    weights = [("model.layers.0.self_attn.q_proj.weight", torch.zeros(4, 4))]
    assert weight_error([weight_squares(weights, Fp8Layers(0, 1))]) == {
        "weight_error/fp8": 0.0,
        "weight_error/layer_0": 0.0,
    }


def test_a_weight_that_is_not_finite_is_refused():
    weights = [("model.layers.0.self_attn.q_proj.weight", torch.full((4, 4), math.nan))]
    with pytest.raises(NonFiniteError):
        weight_squares(weights, Fp8Layers(0, 1))
