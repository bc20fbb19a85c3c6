"""NeMo RL's own `setup`, with fakes in place of its GPUs and workers: what an engine and a trainer are made of."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_fp8rl.nemo_rl.compat import prepare
from nemo_fp8rl.nemo_rl.recipe.checkout import Checkout
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.run.master_config import load_master_config
from nemo_fp8rl.nemo_rl.run.setup import set_up_nemo_rl_workers
from nemo_fp8rl.nemo_rl.stock.fp8_stream import STREAM_KEY
from nemo_fp8rl.nemo_rl.stock.worker_choice import ENGINE_WORKER, STOCK_WORKER, TRAINER_WORKER
from tests.nemo_rl import runs

pytestmark = [pytest.mark.nemo_rl, runs.needs_checkout]


class FakeCluster:
    def __init__(self, **arguments: Any) -> None:
        pass


class FakePolicy:
    def __init__(self, config: dict[str, Any], **arguments: Any) -> None:
        self.config, self.arguments = config, arguments

    def prepare_refit_info(self) -> None: ...

    def print_node_ip_and_gpu_id(self) -> None: ...


class FakeVllmGeneration:
    def __init__(self, config: dict[str, Any], **arguments: Any) -> None:
        self.config = self.cfg = config

    def finish_generation(self) -> None: ...

    def prepare_refit_info(self, state_dict_info: Any) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture
def set_up(tiny: Path, tmp_path: Path, monkeypatch):
    """set_up(*overrides): set_up_nemo_rl_workers, for the tiny model."""
    grpo = prepare()
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.models.policy import lm_policy

    monkeypatch.setattr(grpo, "RayVirtualCluster", FakeCluster)
    monkeypatch.setattr(grpo, "VllmGeneration", FakeVllmGeneration)
    monkeypatch.setattr(lm_policy, "Policy", FakePolicy)
    monkeypatch.setattr(Checkout, "engines_survive_fp8_refit", True)  # v0.7.0's setup is no other
    monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, STOCK_WORKER, "python")
    monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, TRAINER_WORKER, "python")

    def make(*overrides: str) -> Any:
        keys = [*runs.overrides(tiny, tmp_path / "logs"), f"policy.model_name={tiny}/model", *overrides]
        recipe, master = load_recipe(runs.RECIPE, keys), load_master_config(grpo, runs.RECIPE, keys)
        tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1)
        master.policy["generation"] = configure_generation_config(master.policy["generation"], tokenizer)
        return set_up_nemo_rl_workers(grpo, master, recipe, tokenizer, [{}] * 64, None)

    return make


@pytest.mark.parametrize(
    ("said", "own"),
    [
        ("++policy.hf_config_overrides={}", {}),
        ("++policy.hf_config_overrides={rope_theta:10000.0}", {"rope_theta": 10000.0}),
        ("~policy.hf_config_overrides", {}),
    ],
)
def test_the_engine_is_told_what_is_fp8_and_the_trainer_what_the_recipe_says_of_the_model(said, own, set_up):
    with set_up(said) as loop:
        engine, trainer = loop.generation.config, loop.policy
    kwargs = engine["vllm_kwargs"]
    assert (engine["vllm_cfg"]["precision"], kwargs["worker_cls"]) == ("bfloat16", ENGINE_WORKER)
    quantization = kwargs["hf_overrides"].pop("quantization_config")
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    assert kwargs["hf_overrides"] == own
    assert trainer.config["hf_config_overrides"] == own
    assert trainer.config[STREAM_KEY]["scale_format"] == "pow2"
    assert trainer.arguments["worker_extension_cls_fqn"] == TRAINER_WORKER


def test_its_setup_asks_for_no_correction_where_it_is_not_told_of_fp8(set_up):
    """As the doctor says: a warning, no error."""
    key = "loss_fn.truncated_importance_sampling"
    with set_up("loss_fn.use_importance_sampling_correction=false", f"{key}_type=null", f"{key}_ratio=null") as loop:
        assert loop.generation.config["vllm_kwargs"]["worker_cls"] == ENGINE_WORKER


def test_nemo_rls_loop_calibrates_for_an_engine_that_has_an_fp8_kv_cache_of_vllms_own(set_up):
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

    with set_up("policy.generation.vllm_cfg.kv_cache_dtype=fp8") as loop:
        engine, trainer = loop.generation, loop.policy.config
    assert engine.config["vllm_kwargs"]["kv_cache_dtype"] == "fp8"
    assert engine.config["vllm_cfg"]["kv_cache_dtype"] == "auto"  # what it was made of: no patches of vLLM
    assert VllmGeneration.requires_kv_scale_sync.fget(engine)
    assert trainer["generation"]["vllm_cfg"]["kv_cache_dtype"] == "fp8"  # for which its stream has scales


def test_layers_are_those_of_a_composite_models_text(set_up, monkeypatch):
    import transformers

    composite: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: composite)
    with set_up() as loop:
        assert loop.policy.config[STREAM_KEY]["fp8_layers"]["end"] == 2


def test_a_bfloat16_recipe_leaves_both_to_nemo_rl(set_up, monkeypatch):
    import transformers

    def unreadable(name: str) -> None:
        raise ValueError("its config is code of its own")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreadable)
    precision = ("policy.megatron_cfg.fp8_cfg.enabled=false", "policy.generation.vllm_cfg.precision=bfloat16")
    with set_up(*precision, "++policy.hf_config_overrides={rope_theta:10000.0}") as loop:
        engine, trainer = loop.generation.config, loop.policy
    assert engine["vllm_kwargs"]["hf_overrides"] == trainer.config["hf_config_overrides"] == {"rope_theta": 10000.0}
    assert "worker_cls" not in engine["vllm_kwargs"]
    assert "worker_extension_cls_fqn" not in trainer.arguments and STREAM_KEY not in trainer.config
