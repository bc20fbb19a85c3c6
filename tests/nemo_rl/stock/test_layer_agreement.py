"""The layers that `choose_workers` makes FP8 in models as vLLM builds them, and the check of trainer against engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.nemo_rl.stock.layer_agreement import describe_disagreement

LAYERS = 12
"""Of which 1 is the beginning of 10 and 11."""
WORDS = ["a_proj", "b_proj", "layers.5.mlp"]
LATENT: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_experts": 8, "mlp_only_layers": [1]}),
    "moonlight": ("deepseek_v3", "DeepseekV3ForCausalLM", LATENT),
    "deepseek": ("deepseek_v3", "DeepseekV3ForCausalLM", LATENT | {"q_lora_rank": 256}),
}
FP8 = Fp8Layers(1, LAYERS, tuple(WORDS))
"""The trainer's, of the recipe in `built_models`."""


LATENT_ATTENTION = ("moonlight", "deepseek")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Any]:
    return build(tmp_path_factory.mktemp("models"), *(model for model in MODELS if model not in LATENT_ATTENTION))


def build(folder: Path, *models: str) -> dict[str, Any]:
    """Of each model what `built_models` says, in a process of its own."""
    command = [sys.executable, "-m", "tests.nemo_rl.built_models", str(folder), *models]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", [model for model in MODELS if model not in LATENT_ATTENTION])
def test_vllm_holds_in_fp8_exactly_what_the_trainer_streams_in_fp8(model, built):
    agree(**built[model])


@pytest.mark.long
@pytest.mark.parametrize("model", LATENT_ATTENTION)
def test_so_it_does_of_models_with_latent_attention(tmp_path, model):
    agree(**build(tmp_path, model)[model])


def agree(parameters: dict[str, str], fused: dict[str, list[str]]) -> None:
    held = {name: dtype for name, dtype in parameters.items() if name.endswith("weight") and ".layers." in name}
    assert {"torch.float8_e4m3fn", "torch.bfloat16"} <= set(held.values())
    for name, dtype in held.items():
        for module in checkpoint_modules(name, fused):
            assert (dtype == "torch.float8_e4m3fn") == FP8.quantizes(module), name
    assert describe_disagreement(parameters, announced(parameters, fused), fused) == ""


def test_a_matrix_that_one_of_them_alone_has_in_fp8_is_named(built):
    parameters, fused = built["qwen3_moe"].values()
    sent = announced(parameters, fused)
    for module in ("model.layers.3.self_attn.k_proj", "model.layers.3.mlp.experts.7.up_proj"):
        lacks = [name for name in sent if name != f"{module}.weight_scale_inv"]
        expected = module.replace(".7.up_proj", "")
        assert f"the engine holds {expected} in FP8" in describe_disagreement(parameters, lacks, fused)
    for module in ("model.layers.3.mlp.gate", "model.layers.0.self_attn.q_proj"):
        message = describe_disagreement(parameters, [*sent, f"{module}.weight_scale_inv"], fused)
        assert f"the trainer announces scales for {module}, and the engine does not" in message


def test_a_rank_that_holds_some_of_the_layers_agrees_about_those(built):
    parameters, fused = built["qwen3_moe"].values()
    part = [name for name in parameters if ".layers.2." in name]
    assert describe_disagreement(part, announced(parameters, fused), fused) == ""


def announced(parameters: dict[str, str], fused: dict[str, list[str]]) -> list[str]:
    """Names of the trainer's stream, one expert of a layer's for all."""
    names = [module for name in parameters if name.endswith("weight") for module in checkpoint_modules(name, fused)]
    return [f"{name}.{leaf}" for name in names for leaf in ("weight", "weight_scale_inv")[: 1 + FP8.quantizes(name)]]


def checkpoint_modules(parameter: str, fused: dict[str, list[str]]) -> list[str]:
    """The modules of a checkpoint that make a parameter of vLLM's."""
    module = parameter.rpartition(".")[0]
    if module.endswith(".experts.routed_experts"):
        return [module.replace(".routed_experts", ".7.up_proj")]
    path, _, leaf = module.rpartition(".")
    return [f"{path}.{part}" for part in fused.get(leaf, [leaf])]
