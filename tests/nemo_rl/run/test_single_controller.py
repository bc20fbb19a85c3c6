"""NeMo RL's single controller with our parts: its own classes and functions of a checkout, and Ray.

The trainer, the engines and TransferQueue need a GPU or a package that is not here; they are fakes, named so.
"""

import dataclasses
import importlib
import time
from types import SimpleNamespace

import pytest
import ray
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.compat import PREPARE_PROCESS
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE
from nemo_fp8rl.nemo_rl.run import run_loop
from nemo_fp8rl.nemo_rl.stock.fp8_stream import STREAM_KEY
from nemo_fp8rl.nemo_rl.stock.worker_choice import TRAINER_WORKER
from tests.nemo_rl.runs import needs_checkout

pytestmark = [pytest.mark.nemo_rl, needs_checkout]
EXAMPLE = "grpo-llama3.1-8b-instruct-2n8g-async-1off-single-controller-streaming2.yaml"
FP8 = (
    "policy.generation.vllm_cfg.precision=fp8",
    "++policy.megatron_cfg.fp8_cfg={enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}",
    "++policy.megatron_cfg.env_vars={NVTE_FP8_BLOCK_SCALING_FP32_SCALES: '1'}",
)
ROWS, COLUMNS = 6, 9


@pytest.fixture
def example(real_checkout):
    """NeMo RL's own recipe for the single controller."""
    path = real_checkout / "examples/configs/recipes/llm" / EXAMPLE
    if not path.exists():
        pytest.skip("v0.7.x has no single controller")
    return path


@pytest.fixture
def single_controller(example):
    from nemo_fp8rl.nemo_rl.compat import prepare

    prepare()
    return importlib.import_module("nemo_fp8rl.nemo_rl.run.single_controller")


@pytest.fixture
def keys(tiny, tmp_path):
    return [
        f"policy.model_name={tiny}/model",
        f"policy.tokenizer.name={tiny}/model",
        f"logger.log_dir={tmp_path}/logs",
        f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
    ]


@pytest.fixture
def load(single_controller, example, keys):
    """load(key=value, ...): NeMo RL's config of the example, and our recipe of it."""
    from nemo_rl.algorithms import single_controller_utils

    from nemo_fp8rl.nemo_rl.run.master_config import load_master_config

    def load(*overrides):
        both = [*keys, *overrides]
        return load_master_config(single_controller_utils, example, both), load_recipe(example, both)

    return load


@pytest.fixture
def loss_of(single_controller):
    """loss_of(keys of loss_fn): our loss as a run builds it."""
    from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn

    return lambda **keys: GrpoLossFn({"reference_policy_kl_penalty": 0.01, **keys})


@pytest.fixture(scope="module")
def cluster():
    hook = {"worker_process_setup_hook": PREPARE_PROCESS}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=hook)
    yield
    ray.shutdown()


def make_batch(rows):
    """A batch of the columns that the single controller's trainer fetches, no other ones."""
    schema = importlib.import_module("nemo_rl.data_plane.schema")
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(ROWS, COLUMNS, generator=generator) > 0.3).float()
    columns = {
        "input_ids": torch.randint(0, 32, (ROWS, COLUMNS), generator=generator),
        "input_lengths": torch.full((ROWS,), COLUMNS),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1, 1, 0, 1, 1]),
        "advantages": torch.randn(ROWS, 1, generator=generator).expand(ROWS, COLUMNS),
    }
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        columns[name] = -torch.rand(ROWS, COLUMNS, generator=generator)
    assert columns.keys() == set(schema.DP_TRAIN_FIELDS)
    return {name: column[rows] for name, column in columns.items()}


def call(loss, rows, sequences=1.0, tokens=1.0):
    """The loss of these rows, called as NeMo RL's wrapper does, by keyword."""
    logprobs = -torch.rand(ROWS, COLUMNS - 1, generator=torch.Generator().manual_seed(1))
    value, metrics = loss(
        data=make_batch(rows),
        global_valid_seqs=torch.tensor(sequences),
        global_valid_toks=torch.tensor(tokens),
        next_token_logprobs=logprobs[rows],
    )
    return float(value), metrics


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"token_level_loss": False},
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        {"use_importance_sampling_correction": True},
        {"ratio_clip_c": 3.0, "use_on_policy_kl_approximation": True},
        {"use_cispo": True},
    ],
)
def test_chunks_without_a_normalizer_sum_to_the_loss_of_the_step(loss_of, keys):
    """The trainer gives every chunk a normalizer of 1, and divides the gradient by the step's that `loss_type` says."""
    from nemo_rl.algorithms.loss.interfaces import LossType

    loss, whole = loss_of(**keys), make_batch(slice(None))
    sequences = float(whole["sample_mask"].sum())
    tokens = float((whole["token_mask"][:, 1:] * whole["sample_mask"][:, None]).sum())
    expected, _ = call(loss, slice(None), sequences, tokens)
    chunks = sum(call(loss, rows)[0] for rows in (slice(0, 2), slice(2, 3), slice(3, ROWS)))
    assert chunks / (tokens if loss.loss_type == LossType.TOKEN_LEVEL else sequences) == pytest.approx(
        expected, rel=1e-5
    )
    assert expected != 0


def make_arguments(single_controller, loss, transport=None):
    """NeMo RL's arguments of its actor, with fake workers."""
    kind = single_controller.controller_setup.SingleControllerActorArgs
    workers = FakeWorkers({"refit_transport": transport})
    required = {field.name: None for field in dataclasses.fields(kind)}
    parts = {"gen_handle": workers, "trainer_handle": workers, "loss_fn": loss, "weight_synchronizer": "NeMo RL's"}
    return kind(**{**required, **parts, "env_handles": {}, "dataloader": FakeLoader()})


class FakeLoader:
    """In place of the prompts."""

    dataset = None


class FakeWorkers:
    """In place of engines and trainer."""

    def __init__(self, cfg):
        self.cfg, self.ended = cfg, 0

    def shutdown(self):
        self.ended += 1


class FakeController:
    """In place of the actor that trains: takes one step of the loss that reached it, by the actor's own constructor."""

    def __init__(self, master_config, actor_args, setup_timing_metrics):
        self.arguments, self.steps = actor_args, master_config.grpo.max_num_steps - setup_timing_metrics

    def ping(self):
        return {}

    def run(self):
        return {"train_steps": self.steps, "loss": call(self.arguments.loss_fn, slice(None))[0]}


def test_the_loss_reaches_the_actor_and_the_reports_only_our_engine(single_controller, loss_of):
    loss = loss_of()
    for transport, reports in ((None, False), (ENGINE, True)):
        arguments = make_arguments(single_controller, "NeMo RL's", transport)
        ours = single_controller.with_parts_of_ours(arguments, loss)
        arrived = ray.cloudpickle.loads(ray.cloudpickle.dumps(ours))
        assert call(arrived.loss_fn, slice(None)) == call(loss, slice(None))
        assert (type(arrived.weight_synchronizer).__name__ == "PrintingSynchronizer") == reports
        assert (arrived.weight_synchronizer == "NeMo RL's") != reports
        assert arguments.loss_fn == "NeMo RL's"


@pytest.mark.parametrize(
    ("missing", "limit", "completed"), [(0, None, True), (1, None, True), (1, "00:00:10:00", False)]
)
def test_a_run_trains_with_our_loss_and_ends_its_workers(
    single_controller, load, cluster, monkeypatch, missing, limit, completed
):
    """A run that ends early by its time limit is not complete; one whose prompts are used up is."""
    limits = f"++checkpointing.checkpoint_must_save_by={limit or 'null'}", f"checkpointing.enabled={limit is not None}"
    master, recipe = load(*limits)
    arguments, results = make_arguments(single_controller, "NeMo RL's"), []
    wait = single_controller.wait
    monkeypatch.setattr(
        single_controller.controller_setup, "setup_single_controller", lambda *given: (arguments, missing)
    )
    monkeypatch.setattr(single_controller, "SingleControllerActor", ray.remote(FakeController))
    monkeypatch.setattr(single_controller, "wait", lambda *given: results.append(wait(*given)) or results[0])
    assert single_controller.run(master, recipe, None) is completed
    loss, _ = single_controller.prepare_nemo_rl_workers(master, recipe)
    assert results[0]["loss"] == call(loss, slice(None))[0]
    assert arguments.gen_handle.ended == 2  # as engines and as trainer


def test_the_trainer_gets_workers_that_stream_fp8(single_controller, load, monkeypatch):
    """NeMo RL's own `_build_trainer` with a class that records."""
    from nemo_rl.utils import venvs

    monkeypatch.setattr(venvs, "create_local_venv_on_each_node", lambda command, name: "/venvs/python")
    setup = single_controller.controller_setup
    monkeypatch.setattr(setup, "TQPolicy", lambda **given: given)
    master, recipe = load(*FP8, "cluster.num_nodes=1")
    single_controller.prepare_nemo_rl_workers(master, recipe)
    assert master.policy["generation"]["refit_transport"] == ENGINE
    assert "quantization_config" in master.policy["hf_config_overrides"]  # which the engine gets
    with single_controller._policies_stream_fp8():
        trainer, _ = setup._build_trainer(None, master, None, None, weights_path=None, optimizer_path=None)
    assert trainer["worker_extension_cls_fqn"] == TRAINER_WORKER
    assert trainer["dp_cfg"] == master.data_plane
    assert STREAM_KEY in trainer["config"] and not trainer["config"]["hf_config_overrides"]
    trainer, _ = setup._build_trainer(None, master, None, None, weights_path=None, optimizer_path=None)
    assert "worker_extension_cls_fqn" not in trainer  # after the block it is NeMo RL's again


class Goes(Exception):
    """In place of Ray's start."""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], None),
        (FP8, None),
        (
            ["async_rl.min_groups_for_streaming_train=1000"],
            "NeMo RL's single controller refuses this recipe: grpo.num_prompts_per_step",
        ),
        (["policy.train_global_batch_size=64"], "train_global_batch_size"),
        (
            [*FP8, "++policy.generation.vllm_cfg.kv_cache_dtype=fp8"],
            "kv_cache_dtype=fp8 with NeMo RL's own workers is n",
        ),
        (["++nemo_fp8rl.workers=ours"], "this package's have no such client"),
    ],
)
def test_a_recipe_is_judged_before_ray_starts(example, keys, monkeypatch, overrides, message):
    def goes(*given, **options):
        raise Goes

    if "++nemo_fp8rl.workers=ours" not in overrides:
        monkeypatch.setattr(run_loop, "uses_package_workers", lambda asked, flow: False)
    monkeypatch.setattr(run_loop, "_ray", goes)
    with pytest.raises(UserError if message else Goes, match=message):
        run_loop.run(example, [*keys, *overrides])
    assert find_checkout().has_checkpoint_engines


def test_an_actor_that_does_not_answer_ends_the_run(single_controller, cluster):
    @ray.remote
    class Frozen:
        def run(self):
            time.sleep(30)

        def ping(self):
            return {}

    frozen = Frozen.remote()
    watchdog = SimpleNamespace(interval_s=0.2, stall_timeout_s=1.0)
    with pytest.raises(RuntimeError, match=r"single controller has not answered for \d+ s"):
        single_controller.wait(frozen, watchdog)
    ray.kill(frozen)


def test_an_actor_that_fails_is_its_error(single_controller, cluster):
    @ray.remote
    class Failing:
        def run(self):
            raise UserError("the 4th answer is empty")

        def ping(self):
            return {}

    with pytest.raises(UserError, match="the 4th answer is empty"), run_loop.reward_errors():
        single_controller.wait(Failing.remote(), SimpleNamespace(interval_s=5, stall_timeout_s=120))
