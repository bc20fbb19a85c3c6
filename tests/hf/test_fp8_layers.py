"""The FP8 matrices of a recipe, and the sizes of models that allow them."""

import dataclasses
from contextlib import nullcontext

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.hf.divisibility import check_divides
from nemo_fp8rl.hf.fp8_layers import (
    attention_dimensions,
    check_kernel_widths,
    engine_fp8_layers,
    trainer_fp8_layers,
)
from tests.hf.test_hf_files import HF

IGNORED = "policy.generation.vllm_cfg.quantization_ignored_layer_kws"
WHOLE = {"head_dim": 128, "intermediate_size": 256}


@pytest.mark.parametrize(
    "sizes",
    [
        {"intermediate_size": 768},
        {"head_dim": 256, "intermediate_size": 128, "hidden_size": 200},
        {"head_dim": 384},
        {"head_dim": 64},
        {"head_dim": 192},
    ],
)
def test_projections_of_whole_blocks_are_accepted(recipe, sizes):
    hf = dataclasses.replace(HF, **{**WHOLE, **sizes})
    assert engine_fp8_layers(hf, recipe("nemo_fp8rl.flow=fp8_e2e")) == Fp8Layers(0, hf.num_hidden_layers)


@pytest.mark.parametrize(
    ("flow", "dimension", "size", "layer", "fits"),
    [
        ("fp8_e2e", "intermediate_size", 100, "mlp.gate_proj", "128"),
        ("fp8_rollout", "intermediate_size", 352, "mlp.gate_proj", "256 and 384"),
    ],
)
def test_a_projection_that_ends_within_a_block_is_refused_by_layer_and_dimension(
    recipe, flow, dimension, size, layer, fits
):
    hf = dataclasses.replace(HF, **{**WHOLE, dimension: size})
    with pytest.raises(UserError, match=rf"{flow} .*{dimension}={size} of {layer} .*fit: {fits}\).*flow=bf16"):
        engine_fp8_layers(hf, recipe(f"nemo_fp8rl.flow={flow}"))


@pytest.mark.parametrize(
    ("sizes", "word", "left"),
    [({"head_dim": 96}, "q_proj", "o_proj"), ({"intermediate_size": 352}, "mlp", "q_proj")],
)
def test_what_the_message_says_to_keep_in_bfloat16_makes_the_rest_fp8(recipe, sizes, word, left):
    hf = dataclasses.replace(HF, **{**WHOLE, **sizes})
    with pytest.raises(UserError, match=rf"keep that in bfloat16 by {IGNORED}=\[{word}\]"):
        engine_fp8_layers(hf, recipe("nemo_fp8rl.flow=fp8_e2e"))
    layers = trainer_fp8_layers(hf, recipe("nemo_fp8rl.flow=fp8_e2e", f"{IGNORED}=[{word}]"))
    names = {"q_proj": "self_attn.q_proj", "o_proj": "self_attn.o_proj", "mlp": "mlp.up_proj"}
    assert layers.quantizes(f"model.layers.1.{names[left]}.weight")
    assert not layers.quantizes(f"model.layers.1.{names[word]}.weight")


@pytest.mark.parametrize("flow", ["fp8_rollout", "fp8_e2e"])
def test_keys_of_less_than_a_block_are_refused(recipe, flow):
    one_key = dataclasses.replace(HF, **{**WHOLE, "head_dim": 64, "num_key_value_heads": 1})
    with pytest.raises(UserError, match=r"num_key_value_heads \* head_dim=64 of self_attn.k_proj .*q_proj\]"):
        engine_fp8_layers(one_key, recipe(f"nemo_fp8rl.flow={flow}"))


@pytest.mark.parametrize(
    ("ignored", "head_dim", "parts", "refused"),
    [
        ((), 64, 2, ""),
        (
            (),
            64,
            4,
            r"=4 does not divide .*num_key_value_heads \* head_dim=256 of self_attn.k_proj .*: 1, 2$",
        ),
        (("q_proj",), 64, 4, ""),
        (("q_proj",), 32, 4, r"num_attention_heads \* head_dim=256 of self_attn.o_proj .*: 1, 2$"),
        (("q_proj", "o_proj"), 32, 4, ""),
        (("q_proj", "o_proj"), 32, 8, r"num_key_value_heads=4 of self_attn.k_proj; .*: 1, 2, 4$"),
    ],
)
def test_ranks_have_whole_blocks_of_attentions_projections(ignored, head_dim, parts, refused):
    hf = dataclasses.replace(HF, head_dim=head_dim, num_attention_heads=8, num_key_value_heads=4)
    layers = Fp8Layers(0, hf.num_hidden_layers, ignored)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_divides("tensor_parallel_size", parts, *attention_dimensions(hf, layers))


@pytest.mark.parametrize(
    ("flow", "first", "last", "trainer", "engine"),
    [
        ("bf16", 0, 0, (0, 0), (0, 0)),
        ("fp8_rollout", 1, 0, (0, 0), (1, 4)),
        ("fp8_e2e", 0, 0, (0, 4), (0, 4)),
        ("fp8_e2e", 1, 2, (1, 2), (1, 2)),
    ],
)
def test_flow_and_borders_say_which_layers_are_fp8(recipe, flow, first, last, trainer, engine):
    hf = dataclasses.replace(HF, head_dim=128, intermediate_size=256, num_hidden_layers=4)
    vllm = "policy.generation.vllm_cfg"
    cfg = recipe(
        f"nemo_fp8rl.flow={flow}", f"{vllm}.num_first_layers_in_bf16={first}", f"{vllm}.num_last_layers_in_bf16={last}"
    )
    assert trainer_fp8_layers(hf, cfg) == Fp8Layers(*trainer)
    assert engine_fp8_layers(hf, cfg) == Fp8Layers(*engine)


def test_borders_that_leave_no_fp8_layer_are_refused(recipe):
    hf = dataclasses.replace(HF, head_dim=128, intermediate_size=256, num_hidden_layers=4)
    with pytest.raises(UserError, match=r"num_first_layers_in_bf16=3 and num_last_layers_in_bf16=1 .* 4; .*flow=bf16"):
        engine_fp8_layers(
            hf,
            recipe(*(f"policy.generation.vllm_cfg.num_{n}_layers_in_bf16={i}" for n, i in (("first", 3), ("last", 1)))),
        )


@pytest.mark.parametrize(
    ("flow", "sizes", "refused"),
    [
        ("mxfp8_e2e", {"head_dim": 32, "intermediate_size": 96, "hidden_size": 64}, ""),
        ("nvfp4_e2e", {"head_dim": 16, "intermediate_size": 48, "hidden_size": 80}, ""),
        (
            "mxfp8_rollout",
            {"intermediate_size": 48},
            r"intermediate_size=48 .* of 32 \(.* 32 and 64\).*=\[mlp\]",
        ),
        ("nvfp4_a16_e2e", {"intermediate_size": 24}, r"intermediate_size=24 .* of 16 \(nearest .* 16 and 32\)"),
        (
            "nvfp4_e2e",
            {"hidden_size": 72},
            r"hidden_size=72 is not a multiple of 16 .*; use nemo_fp8rl.flow=bf16",
        ),
    ],
)
def test_blocks_of_the_other_formats_are_smaller_and_whole_along_columns(recipe, flow, sizes, refused):
    hf = dataclasses.replace(HF, **{**WHOLE, "num_key_value_heads": 1, **sizes})
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        engine_fp8_layers(hf, recipe(f"nemo_fp8rl.flow={flow}"))


@pytest.mark.parametrize(("flow", "refused"), [("nvfp4_a16_e2e", True), ("nvfp4_e2e", True), ("mxfp8_e2e", False)])
def test_kernels_of_4_bits_take_whole_tiles_in_each_process(recipe, flow, refused):
    """Half of 96 is whole blocks of 16 in two processes, and no tile of 32."""
    hf = dataclasses.replace(HF, head_dim=64, intermediate_size=96, hidden_size=64)
    words = [f"nemo_fp8rl.flow={flow}", "policy.generation.vllm_cfg.tensor_parallel_size=2", "cluster.backend=ray"]
    check_kernel_widths(hf, recipe(words[0]))
    told = r"of 4 bits take multiples of 32 .* has intermediate_size=48 of mlp.gate_proj; lower"
    with pytest.raises(UserError, match=told) if refused else nullcontext():
        check_kernel_widths(hf, recipe(*words))
