"""The keys that `choose_workers` changes in a recipe, and the environments in which the chosen actors run."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.stock.fp8_stream import STREAM_KEY
from nemo_fp8rl.nemo_rl.stock.worker_choice import (
    E8M0,
    ENGINE_WORKER,
    STOCK_WORKER,
    TRAINER_WORKER,
    choose_workers,
    declare_kv_cache,
)
from tests.nemo_rl.runs import environment, needs_checkout
from tests.nemo_rl.stock.fake_trainer import policy

LAST = {"num_last_layers_in_bf16": 2}


@pytest.mark.parametrize(
    ("vllm_cfg", "given", "expected"),
    [
        ({}, None, (True, 1, 0)),
        (LAST, {"moe_router_fusion": True}, (True, 1, 2)),
        (LAST, {"num_layers_at_end_in_bf16": 2}, (True, 1, 2)),
        ({"num_first_layers_in_bf16": 0}, None, None),
    ],
)
def test_a_trainer_in_fp8_has_the_engines_layers_in_bfloat16(vllm_cfg, given, expected):
    cfg = policy(**vllm_cfg)
    cfg["megatron_cfg"] = cfg["megatron_cfg"] | {"model_overrides": given}
    choose_workers(cfg, num_hidden_layers=8, survives_refit=True)
    keys = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    layers = dict(zip(keys, expected, strict=True)) if expected else {}
    assert (cfg["megatron_cfg"]["model_overrides"] or {}) == (given or {}) | layers


def test_a_trainer_in_bfloat16_is_left_as_it_is():
    cfg = policy()
    before = cfg["megatron_cfg"] = {"enabled": True}
    choose_workers(cfg, num_hidden_layers=8, survives_refit=True)
    assert cfg["megatron_cfg"] is before


@pytest.mark.parametrize(
    ("vllm_cfg", "megatron", "message"),
    [
        (
            LAST,
            {"model_overrides": {"num_layers_at_end_in_bf16": 1}},
            r"end_in_bf16=1 .* 1 first and 2 last ones: leave",
        ),
        (
            {"num_first_layers_in_bf16": 0},
            {"model_overrides": {"first_last_layers_bf16": True}},
            r"first_last_layers_bf16=True gives the trainer other bfloat16 layers .* 0 first and 0 last ones",
        ),
        (
            {"num_last_layers_in_bf16": 3},
            {"pipeline_model_parallel_size": 4},
            r"num_first_layers_in_bf16=1 and num_last_layers_in_bf16=3: .* pipeline stage has, 2; lower them",
        ),
    ],
)
def test_bf16_layers_that_the_trainer_cannot_have_are_refused(vllm_cfg, megatron, message):
    cfg = policy(**vllm_cfg)
    cfg["megatron_cfg"] = cfg["megatron_cfg"] | megatron
    with pytest.raises(UserError, match=message):
        choose_workers(cfg, num_hidden_layers=8, survives_refit=True)


def test_the_engine_is_vllms_own_fp8_with_our_worker():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    generation = cfg["generation"]
    layers = {"first": 1, "end": 2, "ignored": []}
    assert cfg[STREAM_KEY] == {"scale_format": "pow2", "fp8_layers": layers, "hf_config_overrides": {}}
    assert generation["vllm_cfg"]["precision"] == "bfloat16"  # so that NeMo RL patches nothing
    assert generation["vllm_kwargs"]["worker_cls"] == ENGINE_WORKER
    assert generation["vllm_kwargs"]["moe_backend"] == "triton"
    quantization = cfg["hf_config_overrides"]["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert "model.layers.0.mlp.down_proj" in quantization["modules_to_not_convert"]
    assert "model.layers.1.mlp.down_proj" not in quantization["modules_to_not_convert"]


def test_float32_scales_are_not_rounded_in_the_engine():
    from vllm import envs

    words = {"pow2_weight_scaling_factors": False, "pow2_activation_scaling_factors": False}
    cfg = policy(**words, env_vars={"OTHER": "1"})
    cfg["megatron_cfg"] = cfg["megatron_cfg"] | {"env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}}
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    assert cfg["generation"]["vllm_cfg"]["env_vars"] == {"OTHER": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert E8M0 in envs.environment_variables
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    assert "env_vars" not in cfg["generation"]["vllm_cfg"]  # powers of two stay what they are


def test_an_fp8_kv_cache_is_declared_after_the_engine_is_built():
    cfg = policy(kv_cache_dtype="fp8_e4m3")
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    generation = cfg["generation"]
    assert generation["vllm_kwargs"]["kv_cache_dtype"] == "fp8_e4m3"
    assert generation["vllm_cfg"]["kv_cache_dtype"] == "auto"  # or NeMo RL would ask for patches of vLLM
    engine = SimpleNamespace(cfg=generation)
    declare_kv_cache(engine, cfg)
    assert engine.cfg == {**generation, "vllm_cfg": generation["vllm_cfg"] | {"kv_cache_dtype": "fp8_e4m3"}}


def test_an_fp8_kv_cache_of_latent_attention_is_refused():
    with pytest.raises(UserError, match=r"no scales for latent attention .*set \S*kv_cache_dtype=auto"):
        choose_workers(policy(kv_cache_dtype="fp8"), num_hidden_layers=2, survives_refit=True, latent=True)
    choose_workers(cfg := policy(), num_hidden_layers=2, survives_refit=True, latent=True)
    assert STREAM_KEY in cfg


def test_a_recipe_without_an_fp8_kv_cache_leaves_it_to_vllm():
    for cfg in (policy(), policy(precision="bfloat16") | {"megatron_cfg": {"enabled": True}}):
        choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
        assert "kv_cache_dtype" not in cfg["generation"]["vllm_kwargs"]
        engine = SimpleNamespace(cfg=cfg["generation"])
        declare_kv_cache(engine, cfg)
        assert engine.cfg["vllm_cfg"].get("kv_cache_dtype", "auto") == "auto"


REGISTRY = f"""
import json, sys
sys.modules.update(dict.fromkeys(("numba", "vllm", "megatron")))  # which the driver's environment does not have

import nemo_fp8rl.cli, nemo_fp8rl.nemo_rl.run.setup
from nemo_fp8rl.nemo_rl.compat import prepare

prepare()
import nemo_fp8rl.nemo_rl.adapters.loss_fn
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.models.policy import lm_policy
from nemo_rl.utils import venvs
from nemo_fp8rl.nemo_rl.adapters import environment
from nemo_fp8rl.nemo_rl.stock.worker_choice import policy_factory

lm_policy.Policy = lambda **arguments: arguments
venvs.create_local_venv_on_each_node = lambda command, name: f"/venvs/{{name}}/bin/python"
before = dict(ACTOR_ENVIRONMENT_REGISTRY)
generation = {{"vllm_cfg": {{}}, "vllm_kwargs": {{}}}}
made = policy_factory(config={{"{STREAM_KEY}": {{"hf_config_overrides": {{}}}}, "generation": generation}})
print(json.dumps([made["worker_extension_cls_fqn"], ACTOR_ENVIRONMENT_REGISTRY["{TRAINER_WORKER}"]]))
for ours in (False, True):
    environment.register(ours)
    print(json.dumps([ACTOR_ENVIRONMENT_REGISTRY[name] for name in environment.COLLECTORS]))
print(json.dumps([[before[name] for name in environment.COLLECTORS], sys.executable]))
"""


@pytest.mark.nemo_rl
@needs_checkout
@pytest.mark.parametrize("system", [False, True])
def test_actors_run_in_the_right_environment(system, tmp_path):
    """Ours of its trainer in the environment of its own; its collectors where they are, and with our workers here."""
    variables = environment(tmp_path) | {"NEMO_RL_PY_EXECUTABLES_SYSTEM": str(int(system))}
    command = [sys.executable, "-c", REGISTRY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    trainer, stays, ours, (before, here) = (json.loads(line) for line in done.stdout.splitlines() if line[0] == "[")
    assert trainer == [TRAINER_WORKER, here if system else f"/venvs/{STOCK_WORKER}/bin/python"]
    assert stays == before and all(command.startswith("uv ") for command in before)
    assert ours == [here, here]


BACKENDS = """
import sys
from types import SimpleNamespace
from nemo_fp8rl.nemo_rl.compat import prepare

prepare()
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_fp8rl.nemo_rl.adapters.environment import COLLECTORS
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.run.install import backends

try:
    with backends(SimpleNamespace(model_dump=dict), None):
        pass
except UserError:  # a config without a policy
    print("HERE", all(ACTOR_ENVIRONMENT_REGISTRY[name] == sys.executable for name in COLLECTORS))
"""


@pytest.mark.nemo_rl
@needs_checkout
def test_collectors_of_a_custom_runner_run_in_its_environment(tmp_path):
    command = [sys.executable, "-c", BACKENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(tmp_path), check=False)
    assert "HERE True" in done.stdout, done.stderr[-3000:]
