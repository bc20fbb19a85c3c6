"""The same classes as Ray actors: the same numbers as in one process. Runs the command, as a user does; of one process,
in this one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import ray

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.workers import WorkerDied
from nemo_fp8rl.workers.ray_actors import _translate_error
from tests.conftest import COLOCATED, RECIPES


def run(overrides: tuple[str, ...], log_dir: Path, *options: str, steps: int = 3) -> list[dict[str, float]]:
    """Return what `nemo-fp8rl train` in a new process measured in so many steps."""
    command = [sys.executable, "-m", "nemo_fp8rl.cli", *arguments(overrides, log_dir, steps), *options]
    done = subprocess.run(command, capture_output=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    return measured(log_dir)


def arguments(overrides: tuple[str, ...], log_dir: Path, steps: int) -> list[str]:
    keys = (*overrides, f"logger.log_dir={log_dir}", f"grpo.max_num_steps={steps}")
    return ["train", "--config", str(RECIPES / "tiny_cpu.yaml"), *keys]


def measured(log_dir: Path) -> list[dict[str, float]]:
    """Return the metrics that depend neither on the clock nor on the transport."""
    rows = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    other = ("timing/", "performance/", "refit/", "memory/")
    return [{name: v for name, v in row.items() if not name.startswith(other)} for row in rows]


@pytest.fixture(scope="module")
def in_process(warm_overrides, tmp_path_factory) -> list[dict[str, float]]:
    log_dir = tmp_path_factory.mktemp("in_process") / "run"
    with mock.patch.dict(os.environ):  # a run's own, which `run` is not to find
        assert main(arguments(warm_overrides, log_dir, steps=3)) == 0
    return measured(log_dir)


@pytest.mark.long
@pytest.mark.parametrize("places", [(), COLOCATED], ids=["own", "colocated"])
def test_actors_give_the_numbers_of_one_process(warm_overrides, tmp_path, in_process, places):
    assert run((*warm_overrides, "cluster.backend=ray", *places), tmp_path / "run") == in_process


@pytest.mark.long
def test_two_ranks_and_two_colocated_engines_agree_with_one(warm_overrides, tmp_path, in_process):
    """The first step samples from the same weights; gradients are summed in another order, so later ones may drift."""
    split = ("cluster.backend=ray", "cluster.train_ranks=2", "cluster.generation_engines=2", *COLOCATED)
    rows = run((*warm_overrides, *split, "policy.train_micro_batch_size=32"), tmp_path / "run")
    first, reference = rows[1], in_process[1]
    assert first["train/reward"] == reference["train/reward"]
    assert first["train/global_valid_toks"] == reference["train/global_valid_toks"]
    assert first["train/loss"] == pytest.approx(reference["train/loss"], abs=1e-5)
    assert first["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=2e-2)
    assert all(row["train/token_mult_prob_error"] < 1.001 for row in rows[1:])


TENSOR = ("policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.sequence_parallel=true")
KV = "policy.generation.vllm_cfg.kv_cache_dtype"
PIPELINE = ("policy.megatron_cfg.pipeline_model_parallel_size=2",)
EXPERTS_WHOLE = "policy.megatron_cfg.expert_tensor_parallel_size=1"
CONTEXT = ("policy.megatron_cfg.context_parallel_size=2",)


@pytest.mark.parametrize(
    ("layout", "rounding"),
    [
        pytest.param(TENSOR, 2e-2, id="tensor"),
        pytest.param(TENSOR[:1], 2e-2, id="tensor without sequence", marks=pytest.mark.long),
        pytest.param(CONTEXT, 2e-2, id="context", marks=pytest.mark.long),
        pytest.param(PIPELINE, 1e-6, id="pipeline", marks=pytest.mark.long),
    ],
)
def test_two_ranks_that_share_the_model_agree_with_one(warm_overrides, tmp_path, in_process, layout, rounding):
    """The first step samples from the same weights. Pipeline stages compute what one rank does; of other ranks the
    gradients are sums of rounded parts, of tokens or of features, so weights and later steps drift.
    """
    rows = run((*warm_overrides, "cluster.backend=ray", "cluster.train_ranks=2", *layout), tmp_path / "run")
    assert_first_step_agrees(rows, in_process, rounding)
    assert all(row["train/token_mult_prob_error"] < 1.001 for row in rows[1:])
    if layout == PIPELINE:
        for one, two in zip(in_process[1:], rows[1:], strict=True):
            assert one["train/reward"] == two["train/reward"]
            assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("choices", "limit"),
    [
        (("nemo_fp8rl.flow=bf16",), 1.001),
        ((f"{KV}=fp8",), 1.002),
        ((f"{KV}=fp8", "nemo_fp8rl.flow=bf16"), 1.002),
    ],
    ids=["bf16", "fp8-kv", "bf16-kv"],
)
def test_two_ranks_that_share_the_model_agree_with_the_engine(warm_overrides, tmp_path, choices, limit):
    rows = run((*warm_overrides, "cluster.backend=ray", "cluster.train_ranks=2", *TENSOR, *choices), tmp_path / "run")
    assert all(row["train/token_mult_prob_error"] < limit for row in rows[1:])


@pytest.mark.long
@pytest.mark.parametrize("flow", ["fp8_e2e", "bf16"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ({"family": "qwen3_moe", "moe_intermediate_size": 256}, 1.002),  # whole blocks on each of two ranks
        ({"family": "qwen2", "num_key_value_heads": 2}, 1.001),
        ({"family": "llama", "num_key_value_heads": 2}, 1.001),
    ],
    ids=["qwen3_moe", "qwen2", "llama"],
)
def test_every_family_on_two_ranks_agrees_with_the_engine(tiny_overrides, tmp_path, sizes, limit, cache, flow):
    write_model(tmp_path / "model", **sizes)
    choices = (f"policy.model_name={tmp_path}/model", f"nemo_fp8rl.flow={flow}", f"{KV}={cache}", *TENSOR)
    rows = run((*tiny_overrides, "cluster.backend=ray", "cluster.train_ranks=2", *choices), tmp_path / "run", steps=2)
    limit = 1.002 if cache == "fp8" else limit
    assert all(row["train/token_mult_prob_error"] < limit for row in rows[1:])


@pytest.mark.long
@pytest.mark.parametrize("layout", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_two_ranks_refit_an_engine_of_two(warm_overrides, tmp_path, in_process, layout):
    """Each rank of the engine takes its parts from those that hold them; after every refit all bytes are compared."""
    engine = ("policy.generation.vllm_cfg.tensor_parallel_size=2", "nemo_fp8rl.refit.verify=full")
    rows = run((*warm_overrides, "cluster.backend=ray", "cluster.train_ranks=2", *layout, *engine), tmp_path / "run")
    assert rows[1]["train/global_valid_toks"] == in_process[1]["train/global_valid_toks"]
    assert all(row["train/token_mult_prob_error"] < 1.02 for row in rows[1:])


@pytest.mark.long
def test_a_run_goes_on_with_other_replicas(warm_overrides, tmp_path):
    """Two ranks that shared the model have one each from then on, so each takes half of the microbatch."""
    on_two = (*warm_overrides, "cluster.backend=ray", "cluster.train_ranks=2", "policy.train_micro_batch_size=64")
    run((*on_two, *TENSOR), tmp_path / "run")
    rows = run((*on_two, "policy.train_micro_batch_size=32"), tmp_path / "run", "--resume", steps=5)
    assert [row["step"] for row in rows][-2:] == [4, 5]
    assert all(row["train/token_mult_prob_error"] < 1.001 for row in rows[1:])


def assert_first_step_agrees(rows: list[dict[str, float]], with_one: list[dict[str, float]], rounding: float) -> None:
    first, reference = rows[1], with_one[1]
    assert reference["train/grad_norm"] > 0  # else nothing below could differ
    assert first["train/reward"] == reference["train/reward"]
    assert first["train/loss"] == pytest.approx(reference["train/loss"], abs=1e-5)
    assert first["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=rounding)


EXPERTS = ("policy.megatron_cfg.expert_model_parallel_size=2",)


@pytest.mark.long
@pytest.mark.parametrize("flow", ["fp8_e2e", "bf16"])
def test_two_ranks_that_share_the_experts_agree_with_one(tiny, tiny_overrides, tmp_path, flow):
    """With half of the batch each, or half of every other matrix: gradients are sums of rounded parts, and later steps
    may drift.
    """
    write_model(tmp_path / "model", family="qwen3_moe", moe_intermediate_size=256)  # whole blocks on each of two ranks
    paths = (f"policy.model_name={tmp_path}/model", f"data.train.data_path={tiny}/data.jsonl")
    assert sft(
        load(RECIPES / "tiny_sft.yaml", [*paths, "sft.max_num_steps=100", f"logger.log_dir={tmp_path}/sft"]),
        tmp_path / "warm",
    )
    model = (f"policy.model_name={tmp_path}/warm", "policy.train_micro_batch_size=32", f"nemo_fp8rl.flow={flow}")
    warm = (*tiny_overrides, *model)
    one = run(warm, tmp_path / "one")
    layouts = {"halves": EXPERTS, "tensor": (*EXPERTS, *TENSOR, EXPERTS_WHOLE), "halves of each": TENSOR}
    for name, layout in layouts.items():
        rows = run((*warm, "cluster.backend=ray", "cluster.train_ranks=2", *layout), tmp_path / name)
        assert_first_step_agrees(rows, one, 2e-2)
        assert all(row["train/token_mult_prob_error"] < 1.002 for row in rows[1:])


THREE_NODES = """
import os, sys, time
import ray
from ray.cluster_utils import Cluster
from nemo_fp8rl import workers
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load

class Probe:
    def node(self):
        return ray.get_runtime_context().get_node_id()

    def sleep(self, seconds):
        time.sleep(seconds)

class Slow:
    def __init__(self):
        time.sleep(60)

cluster = Cluster()
cluster.add_node(num_cpus=2, labels={workers.ROLE: "train"}, include_dashboard=False)
cluster.add_node(num_cpus=2, labels={workers.ROLE: "train"})
lost = cluster.add_node(num_cpus=1, labels={workers.ROLE: "generation"})
cluster.wait_for_nodes()
os.environ["RAY_ADDRESS"] = cluster.address
cfg = load(sys.argv[1], ["cluster.backend=ray"])
impatient = load(sys.argv[1], ["cluster.backend=ray", "cluster.engine_timeout_seconds=2"])
try:
    workers.RayWorkers(object, "generation", 2, cfg, 1)
except UserError as error:
    print(error)
try:
    workers.RayWorkers(object, "train", 1, cfg, 3)
except UserError as error:
    print(error)
try:
    workers.RayWorkers(Slow, "train", 1, impatient, 1)
except UserError as error:
    print(error)
one = workers.RayWorkers(object, "generation", 1, cfg, 1)
cluster.remove_node(lost)
one.timeout = 5.0
try:
    one.restart(0)
except UserError as error:
    print(error)
one.shutdown()
ranks = workers.RayWorkers(Probe, "train", 4, cfg, 1)
try:
    workers.start_workers(Probe, "generation", 1, cfg, 4, ranks)
except UserError as error:
    print(error)
engines = workers.start_workers(Probe, "generation", 2, cfg, 2, ranks)
print("nodes", *ranks.call("node", [()] * 4), *engines.call("node", [()] * 2))
try:
    ranks.call("sleep", [(60,), (0,), (0,), (0,)], 1.0)
except workers.WorkerDied as death:
    print("waited", death)
    ranks.restart(0)
print("hung", ranks.outcomes("sleep", {0: (60,), 1: (0,)}, 1.0), ranks.outcomes("sleep", {0: (0,)}, 60.0))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def on_three_nodes() -> str:
    command = [sys.executable, "-c", THREE_NODES, str(RECIPES / "tiny_cpu.yaml")]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wait_for_a_worker_on_a_lost_node_ends(on_three_nodes):
    assert re.search(r"Ray has started no process for generation-\w+-0 for 5 s: .* --resume", on_three_nodes)


def test_only_cpus_of_the_roles_own_nodes_count(on_three_nodes):
    assert "2 object actors need 2 CPUs, Ray has 1 free on nodes with nemo-fp8rl/role=generation;" in on_three_nodes


def test_an_actor_that_fits_on_no_node_is_refused(on_three_nodes):
    assert "each of 1 object actors needs 3 CPUs of one node, and Ray has that free for 0 on nodes" in on_three_nodes


def test_a_worker_that_hangs_is_ended_and_takes_no_other_with_it(on_three_nodes):
    died = "{0: WorkerDied('no answer to sleep in 1 seconds'), 1: None} {0: WorkerDied('its process ended')}"
    assert f"\nhung {died}\n" in on_three_nodes


def test_a_call_of_all_is_not_waited_for_without_end_either(on_three_nodes):
    assert "\nwaited no answer to sleep in 1 seconds\n" in on_three_nodes


def test_a_process_that_does_not_start_in_time_names_the_key(on_three_nodes):
    assert re.search(r"no process for train-\w+-0 for 2 s: see .* raise cluster\.engine_timeout", on_three_nodes)


def test_ranks_are_numbered_node_by_node(on_three_nodes):
    first, second, third, fourth, *_ = on_three_nodes.split("nodes ")[-1].split()
    assert first == second != third == fourth


def test_colocated_engines_are_on_the_nodes_of_the_ranks(on_three_nodes):
    *ranks, first, second = on_three_nodes.split("nodes ")[-1].splitlines()[0].split()
    assert [first, first, second, second] == ranks
    assert "enabled=true: an engine of tensor_parallel_size=4 would be on 2 nodes; take a size" in on_three_nodes


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            ray.exceptions.OutOfMemoryError("Task was killed due to\nthe node running low on memory."),
            WorkerDied,
            "low on",
        ),
        (ray.exceptions.RayActorError(), WorkerDied, "its process ended"),
        (ray.exceptions.ObjectReconstructionFailedError("ab", None, ""), WorkerDied, "lost with its node"),
        (
            ray.exceptions.RayTaskError("load", "", RefitError("no room in /dev/shm")),
            RefitError,
            "^no room in /dev/shm$",
        ),
        (ray.exceptions.RayTaskError("load", "", KeyError("x")), ray.exceptions.RayTaskError, ""),
    ],
)
def test_what_happened_in_an_actor(error, kind, said):
    cause = _translate_error(error)
    assert type(cause) is kind
    assert re.search(said, str(cause))


@pytest.mark.long
def test_an_actors_refusal_is_one_line_too(tiny, warm_overrides, tmp_path):
    """The checkpoint is read inside an actor; an error in it reaches the user as in one process."""
    shutil.copytree(tiny / "model", tmp_path / "model")
    (tmp_path / "model/model.safetensors").write_bytes(b"not a checkpoint")
    arguments = [*warm_overrides, f"policy.model_name={tmp_path}/model", "cluster.backend=ray"]
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "train", "--config", str(RECIPES / "tiny_cpu.yaml"), *arguments]
    done = subprocess.run([*command, f"logger.log_dir={tmp_path}/run"], capture_output=True, check=False, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"nemo-fp8rl: {tmp_path}/model/model.safetensors is not a whole safetensors file")


DIES = """
import os, signal, sys
from nemo_fp8rl import cli, train
from nemo_fp8rl.policy.rank_group import MegatronPolicy

logprobs = MegatronPolicy.logprobs

def kill_and_ask(policy, *arguments):
    pid = policy.ranks.actors[0].__ray_call__.remote(lambda worker: os.getpid())
    import ray
    os.kill(ray.get(pid), signal.SIGKILL)
    return logprobs(policy, *arguments)

MegatronPolicy.logprobs = kill_and_ask
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


@pytest.mark.long
def test_a_rank_that_dies_in_a_step_ends_the_run_in_a_sentence(warm_overrides, tmp_path):
    arguments = [*warm_overrides, "cluster.backend=ray", f"logger.log_dir={tmp_path}/run"]
    command = [sys.executable, "-c", DIES, "--config", str(RECIPES / "tiny_cpu.yaml"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("nemo-fp8rl: a training rank died (its process ended); its output")


TWO_PRETENDED_GPUS = """
import os, sys
import ray
from ray.cluster_utils import Cluster
from nemo_fp8rl import workers
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load

class Probe:
    def devices(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def given(self):
        return [os.environ.get(name) for name in ("OF_RANKS", "OF_ENGINES")]

cluster = Cluster()
cluster.add_node(num_cpus=4, num_gpus=2, include_dashboard=False)
cluster.wait_for_nodes()
os.environ["RAY_ADDRESS"] = cluster.address
of_ranks, of_engines = "policy.megatron_cfg.env_vars.OF_RANKS=r", "policy.generation.vllm_cfg.env_vars.OF_ENGINES='1'"
cfg = load(sys.argv[1], ["cluster.backend=ray", of_ranks, of_engines])
os.environ["CUDA_VISIBLE_DEVICES"] = ""
without = workers.RayWorkers(Probe, "train", 1, cfg, 1)
print("without", without.call("devices", [()]))
without.shutdown()
del os.environ["CUDA_VISIBLE_DEVICES"]
try:
    workers.RayWorkers(Probe, "train", 3, cfg, 1)
except UserError as error:
    print(error)
ranks = workers.RayWorkers(Probe, "train", 2, cfg, 1)
print("ranks", sorted(ranks.call("devices", [(), ()])))
beside = workers.start_workers(Probe, "generation", 2, cfg, 1, ranks)
print("beside", beside.call("devices", [(), ()]) == ranks.call("devices", [(), ()]))
both = workers.start_workers(Probe, "generation", 1, cfg, 2, ranks)
both.restart(0)
print("both", both.call("devices", [()]))
print("given", ranks.call("given", [()] * 2), both.call("given", [()]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def pretended_gpus() -> str:
    """Ray's own accounting of GPUs that are not there; the driver, as on a head without GPUs, sees none. Ray is told to
    hide GPUs from actors that ask for none, as it does by itself before 2.56.
    """
    command = [sys.executable, "-c", TWO_PRETENDED_GPUS, str(RECIPES / "tiny_cpu.yaml")]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    done = subprocess.run(command, capture_output=True, check=False, timeout=120, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_rank_has_a_gpu_of_its_own_where_ray_has_some(pretended_gpus):
    assert "without ['']" in pretended_gpus
    assert "3 Probe actors need 3 GPUs, Ray has 2 free;" in pretended_gpus
    assert "ranks ['0', '1']" in pretended_gpus


def test_the_environment_of_each_role_is_its_own(pretended_gpus):
    assert "given [['r', None], ['r', None]] [[None, '1']]" in pretended_gpus


def test_colocated_engines_have_the_gpus_of_the_ranks(pretended_gpus):
    assert "beside True" in pretended_gpus
    assert "both ['0,1']" in pretended_gpus
