"""Engines that die or hang: their prompts are answered all the same, by the same tokens, and it is counted."""

import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Any

import psutil
import pytest
import torch

from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.vllm_version import vllm_version
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.engine_client import EngineClient
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.train import refit_or_stop
from nemo_fp8rl.workers import WorkerDied, vllm_sockets
from tests.conftest import RECIPES
from tests.generation.far_trainer import FarTrainer, die_in_the_next_refit, move_weights
from tests.generation.pair import FREE, TEXTS, outputs

ASYNC = "policy.generation.vllm_cfg.async_engine=true"
SLEEPS = "policy.generation.vllm_cfg.sleep_level=1"
WAVES = "policy.generation.vllm_cfg.max_num_seqs=8"
"""Two prompts at a time, so that a death finds some answered and others not."""
LONG = replace(FREE, max_new_tokens=40, stop_token_ids=())


class Run:
    """A trainer that does not move and the driver's side of generation."""

    def __init__(self, overrides: tuple[str, ...]) -> None:
        self.overrides, self.cfg = overrides, load(RECIPES / "tiny_cpu.yaml", overrides)
        tokenizer = PromptTokenizer(self.cfg.policy)
        self.prompts = [tuple(tokenizer.tokenizer(text).input_ids) for text in TEXTS]
        self.policy = MegatronPolicy(self.cfg)
        self.generation = EnginePool(self.cfg)
        self.bridge = build_bridge(self.cfg, self.policy, self.generation)
        self.bridge.refit()

    def close(self) -> None:
        self.generation.shutdown()
        self.policy.shutdown()

    def answers(self, disturb=None, of: EngineClient | None = None) -> list:
        """What the engines answer; `disturb()` is called after the first answer."""
        answers = {}
        for i, group in (of or self.generation).stream(self.prompts, range(len(self.prompts)), LONG):
            answers[i] = group
            if disturb is not None:
                disturb()
                disturb = None
        return outputs((answers[i] for i in range(len(self.prompts))), same_batches=False)

    def begin(self, name: str, ended: list[str], sampling: Sampling = LONG) -> Thread:
        """A thread that asks for answers to one prompt, and says when it has them."""

        def ask() -> None:
            self.generation.generate(self.prompts[:1], [0], sampling)
            ended.append(name)

        thread = Thread(target=ask)
        thread.start()
        return thread


def core_process(of: psutil.Process | None = None) -> psutil.Process:
    """Of the engine that this process, or another, started last: its core, or a rank."""
    alive = [p for p in (of or psutil.Process()).children() if p.status() != psutil.STATUS_ZOMBIE]
    return max((p for p in alive if "spawn_main" in " ".join(p.cmdline())), key=psutil.Process.create_time)


@pytest.fixture(scope="module")
def async_run(tiny_overrides):
    run = Run((*tiny_overrides, ASYNC, WAVES, "cluster.max_engine_restarts=10"))
    yield run
    run.close()


def test_a_core_killed_while_it_generates_is_replaced(async_run):
    expected = async_run.answers()
    assert async_run.generation.metrics() == {"generation/engine_restarts": 0, "generation/prompts_retried": 0}
    assert async_run.answers(lambda: core_process().kill()) == expected
    counted = async_run.generation.metrics()
    assert counted["generation/engine_restarts"] == 1
    assert 0 < counted["generation/prompts_retried"] < len(async_run.prompts)


@pytest.mark.long
def test_a_core_found_dead_is_replaced_at_the_next_refit(async_run):
    expected, before = async_run.answers(), async_run.generation.engine_restarts
    engine = async_run.generation.engines.worker
    core = core_process()
    core.kill()
    core.wait()
    assert engine.generating_version() == async_run.bridge.version
    with pytest.raises(WorkerDied):  # as a copy of the generation hears of it, which replaces none
        engine.generate(async_run.prompts[:1], [0], LONG)
    assert engine.generating_version() == -1
    with pytest.raises(UserError, match=r"engine died before the first refit \(the process of its core ended\); what"):
        async_run.generation.describe()  # as at a run's start
    async_run.generation.check_health()
    assert async_run.answers() == expected
    assert async_run.generation.engine_restarts == before + 1


@pytest.mark.long
def test_a_core_found_dead_when_engines_go_to_sleep_is_replaced_by_one_that_sleeps(async_run, monkeypatch):
    expected, generation = async_run.answers(), async_run.generation
    monkeypatch.setattr(generation, "cfg", load(RECIPES / "tiny_cpu.yaml", (*async_run.overrides, SLEEPS)))
    core = core_process()
    core.kill()
    core.wait()
    generation.finish_generation()
    with pytest.raises(RuntimeError, match="this engine sleeps"):
        async_run.answers()
    generation.prepare_for_generation()
    assert async_run.answers() == expected


def test_a_core_that_dies_in_a_refit_is_replaced_and_gets_the_whole_version(async_run):
    expected, before = async_run.answers(), async_run.generation.engine_restarts
    core_process().kill()
    report = async_run.bridge.refit()
    assert (report.retries, async_run.generation.engine_restarts) == (1, before + 1)
    assert async_run.answers() == expected


def look_until_it_is_replaced(generation: EnginePool) -> None:
    """vLLM hears of its core's death a little later than we do."""
    before, deadline = generation.engine_restarts, time.monotonic() + 60
    while generation.engine_restarts == before:
        assert time.monotonic() < deadline
        generation.check_health()
        time.sleep(0.01)


@pytest.mark.long
def test_what_a_refit_found_dead_and_another_thread_has_replaced_is_not_replaced_again(async_run):
    expected, before = async_run.answers(), async_run.generation.engine_restarts
    async_run.generation.fence([0])
    core = core_process()
    core.kill()
    core.wait()
    another = Thread(target=look_until_it_is_replaced, args=(async_run.generation,))
    another.start()
    another.join()
    assert async_run.generation.engine_restarts == before + 1
    async_run.generation.replace(0, WorkerDied("the process of its core ended"))
    assert async_run.generation.engine_restarts == before + 1
    assert async_run.answers() == expected


@pytest.mark.long
def test_an_engine_that_dies_as_it_starts_again_is_started_once_more(async_run, monkeypatch):
    expected, before = async_run.answers(), async_run.generation.engine_restarts
    engines = async_run.generation.engines
    restart, tried = engines.restart, []

    def dies_at_first(engine):
        tried.append(engine)
        if len(tried) == 1:
            raise WorkerDied("its process ended")
        restart(engine)

    monkeypatch.setattr(engines, "restart", dies_at_first)
    core = core_process()
    core.kill()
    core.wait()
    look_until_it_is_replaced(async_run.generation)
    assert async_run.generation.engine_restarts == before + 2
    assert async_run.answers() == expected


def test_a_core_that_hangs_counts_as_dead(async_run):
    expected, before = async_run.answers(), async_run.generation.engine_restarts
    engine = async_run.generation.engines.worker
    engine.core.timeout = 2.0
    hung = core_process()
    assert async_run.answers(hung.suspend) == expected
    assert async_run.generation.engine_restarts == before + 1
    assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_a_core_that_a_copy_found_slow_answers_it_again_after_the_next_refit(async_run, monkeypatch):
    expected, before = async_run.answers(), async_run.generation.engine_restarts
    engine, slow = async_run.generation.engines.worker, core_process()
    slow.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "timeout", 0.5)
        with pytest.raises(WorkerDied, match="no answer complete in"):
            engine.generate(async_run.prompts[:1], [0], replace(LONG, max_new_tokens=1))
    slow.resume()
    assert engine.generating_version() == -1
    assert async_run.bridge.refit().retries == 0
    assert engine.generating_version() == async_run.bridge.version
    assert async_run.answers() == expected
    assert async_run.generation.engine_restarts == before


@pytest.mark.long
def test_a_call_that_comes_while_an_engine_is_replaced_waits_for_it(async_run):
    expected, ended = async_run.answers(), list[str]()
    core = core_process()
    core.kill()
    core.wait()
    finds_it_dead = async_run.begin("finds it dead", ended)
    while not async_run.generation.missing:
        time.sleep(0.001)
    assert async_run.answers() == expected
    finds_it_dead.join()
    assert ended == ["finds it dead"] and not async_run.generation.missing


def test_a_refit_waits_for_what_other_threads_were_promised(async_run):
    ended: list[str] = []
    long = async_run.begin("long", ended)
    readers = async_run.generation.engines.worker.readers
    while not any(readers._counts.values()):
        time.sleep(0.001)
    async_run.begin("short", ended, replace(LONG, max_new_tokens=1)).join()
    assert ended == ["short"]  # it did not wait for the long one's end
    assert async_run.bridge.refit().retries == 0
    assert ended == ["short", "long"]
    long.join()


@pytest.mark.long
def test_a_core_that_dies_while_a_refit_waits_for_another_threads_answers_is_replaced_by_the_refit(async_run):
    ended: list[str] = []
    before = async_run.generation.engine_restarts
    waits = async_run.begin("waits", ended)
    readers = async_run.generation.engines.worker.readers
    while not any(readers._counts.values()):
        time.sleep(0.001)
    refit = Future()
    refitting = Thread(target=lambda: refit.set_result(async_run.bridge.refit()))
    refitting.start()
    while async_run.generation.engines.worker.policy_version >= 0:
        time.sleep(0.001)
    core_process().kill()
    assert refit.result(60).version == async_run.bridge.version
    waits.join()
    assert ended == ["waits"]
    assert async_run.generation.engine_restarts == before + 1


@pytest.mark.long
def test_an_engine_that_does_not_take_the_weights_when_it_starts_again_says_why(async_run, monkeypatch):
    offer = async_run.policy.offer

    def refuse(*_):
        raise RefitError("no room for a link")

    monkeypatch.setattr(async_run.policy, "offer", refuse)
    with pytest.raises(
        UserError, match=r"engine 0 died .* started again, without the weights: no room for a link; mend"
    ):
        async_run.answers(lambda: core_process().kill())
    monkeypatch.setattr(async_run.policy, "offer", offer)
    async_run.bridge.refit()
    async_run.answers()


@pytest.mark.long
def test_long_answers_have_longer_to_come(async_run, monkeypatch):
    engines, waits = async_run.generation.engines, []
    stream = engines.stream
    monkeypatch.setattr(engines, "stream", lambda *arguments: waits.append(arguments[-1]) or stream(*arguments))
    async_run.answers()
    assert waits == [1800 + 0.1 * LONG.max_new_tokens]


class StopsTheCore:
    """A trainer's end of a link that stops the engine's core when it has sent the first bucket."""

    def __init__(self, end) -> None:
        self.end = end
        self.has_free_buffer, self.acquire_buffer, self.close = end.has_free_buffer, end.acquire_buffer, end.close
        self.wait_for_places = end.wait_for_places
        self.stopped: psutil.Process | None = None

    def send(self, header: bytes, nbytes: int) -> None:
        self.end.send(header, nbytes)
        if self.stopped is None:
            self.stopped = core_process()
            self.stopped.suspend()


@pytest.mark.long
def test_a_core_that_hangs_in_a_refit_is_replaced_after_the_timeout_and_gets_the_whole_version(async_run):
    expected, before = async_run.answers(), async_run.generation.engine_restarts
    async_run.generation.engines.worker.core.timeout = 2.0  # cluster.engine_timeout_seconds, once it has started
    sender = async_run.policy.ranks.worker.refit
    ((key, link),) = sender.link_ends.items()
    stopping = StopsTheCore(link.result())
    sender.link_ends[key] = Future()
    sender.link_ends[key].set_result(stopping)
    start = time.monotonic()
    report = async_run.bridge.refit()
    assert 2.0 < time.monotonic() - start < 60.0
    assert (report.retries, async_run.generation.engine_restarts) == (1, before + 1)
    assert not stopping.stopped.is_running() or stopping.stopped.status() == psutil.STATUS_ZOMBIE
    assert async_run.answers() == expected


def test_one_death_too_many_ends_the_run(async_run, monkeypatch):
    restarts = async_run.generation.engine_restarts
    limited = load(RECIPES / "tiny_cpu.yaml", (*async_run.overrides, f"cluster.max_engine_restarts={restarts}"))
    monkeypatch.setattr(async_run.generation, "cfg", limited)
    with pytest.raises(UserError, match=rf"after {restarts} restarts .*cluster\.max_engine_restarts.*--resume"):
        async_run.answers(lambda: core_process().kill())


def test_an_engine_that_does_not_start_in_time_ends_the_run_in_a_sentence(tiny_overrides, tmp_path):
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "train", "--config", str(RECIPES / "tiny_cpu.yaml")]
    keys = (*tiny_overrides, ASYNC, "cluster.engine_timeout_seconds=1", f"logger.log_dir={tmp_path}/run")
    done = subprocess.run([*command, *keys], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2, done.stderr
    sentence = "nemo-fp8rl: an engine died before the first refit (no answer in 1 seconds); what it wrote says why"
    assert done.stderr.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in done.stderr


def test_a_trainer_killed_in_a_refit_leaves_the_engine_fenced_until_a_whole_version_came(tiny_overrides):
    cfg = load(RECIPES / "tiny_cpu.yaml", tiny_overrides)
    prompts = [tuple(PromptTokenizer(cfg.policy).tokenizer(text).input_ids) for text in TEXTS]
    trainer = FarTrainer(cfg)
    generation = EnginePool(cfg, "token")
    (model,) = generation.engines.worker.core.rpc("get_model")

    def linked(trainer: FarTrainer, first_version: int) -> RefitBridge:
        trainer.open_refit("shared_memory", generation.token)
        return RefitBridge(trainer, generation, mode="delta", transport="shared_memory", first_version=first_version)

    def answers() -> list:
        return outputs(generation.generate(prompts, range(len(prompts)), FREE))

    def weights() -> list[torch.Tensor]:
        return [layer.self_attn.o_proj.weight.view(torch.uint8).clone() for layer in model.model.layers]

    bridge = linked(trainer, 0)
    bridge.refit()
    expected, (first, last) = answers(), weights()
    trainer.do(move_weights)
    trainer.do(die_in_the_next_refit)
    with pytest.raises(WorkerDied, match="the trainer's process ended"):
        bridge.refit()
    trainer.process.join()
    assert trainer.process.exitcode == -signal.SIGKILL
    assert [torch.equal(*pair) for pair in zip(weights(), (first, last), strict=True)] == [False, True]
    with pytest.raises(UserError, match=r"the trainer's process ended; .*continue with --resume"):
        refit_or_stop(bridge)
    with pytest.raises(RefitError, match="has not received weights that were committed: refit before generating"):
        answers()
    another = FarTrainer(cfg)
    report = linked(another, 2).refit()
    assert (report.version, report.delta, report.retries) == (2, False, 0)
    assert answers() == expected
    generation.shutdown()
    another.close()


@pytest.fixture(scope="module")
def parallel_run(tiny_overrides):
    run = Run((*tiny_overrides, "policy.generation.vllm_cfg.tensor_parallel_size=2", WAVES))
    yield run
    run.close()


@pytest.mark.long
@pytest.mark.skipif(vllm_version() < (0, 28), reason="vLLM 0.25 waits for a rank that is gone")
def test_a_rank_killed_while_its_engine_generates_is_replaced_with_it(parallel_run):
    expected, before = parallel_run.answers(), parallel_run.generation.engine_restarts
    assert parallel_run.answers(lambda: core_process().kill()) == expected
    assert parallel_run.generation.engine_restarts == before + 1


@pytest.fixture
def hung_rank(monkeypatch) -> Iterator[psutil.Process]:
    """One of the engine's ranks, to be suspended; vLLM waits for it for seconds, not minutes."""
    from vllm import envs

    monkeypatch.setitem(vars(envs), "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", 3)
    monkeypatch.setitem(vars(envs), "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", 1)
    rank = core_process()
    yield rank
    if rank.is_running():
        rank.kill()


@pytest.mark.long
def test_a_rank_that_hangs_while_its_engine_generates_is_replaced_with_it(parallel_run, hung_rank):
    expected, before = parallel_run.answers(), parallel_run.generation.engine_restarts
    assert parallel_run.answers(hung_rank.suspend) == expected
    assert parallel_run.generation.engine_restarts == before + 1
    assert not hung_rank.is_running() or hung_rank.status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_a_rank_that_hangs_in_a_refit_is_replaced_with_its_engine_after_the_timeout(parallel_run, hung_rank):
    expected, before = parallel_run.answers(), parallel_run.generation.engine_restarts
    parallel_run.generation.engines.worker.core.timeout = 3.0  # cluster.engine_timeout_seconds
    hung_rank.suspend()
    report = parallel_run.bridge.refit()
    assert (report.retries, parallel_run.generation.engine_restarts) == (1, before + 1)
    assert not hung_rank.is_running() or hung_rank.status() == psutil.STATUS_ZOMBIE
    assert parallel_run.answers() == expected


def process_of(actor) -> psutil.Process:
    """Of a Ray actor."""
    import ray

    return psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def kill_one_of_two(overrides: list[str]) -> dict[str, object]:
    """Two engines under Ray, one of which is killed after the first answer."""
    import ray

    run = Run((*overrides, "cluster.backend=ray", "cluster.generation_engines=2", ASYNC, WAVES))
    expected = run.answers()
    actor = process_of(run.generation.engines.actors[1])
    started = actor.children(recursive=True)
    ended: list[str] = []
    long = [run.begin("long", ended) for _ in run.generation.engines.actors]  # one for each
    time.sleep(0.1)
    run.begin("short", ended, replace(LONG, max_new_tokens=1)).join()
    for thread in long:
        thread.join()
    equal = run.answers(actor.kill) == expected
    refit = run.bridge.refit()
    copy = pickle.loads(ray.cloudpickle.dumps(run.generation))  # as in the process of NeMo RL's collector
    run.answers(of=copy)  # the copy then knows that both engines have weights, and divides its prompts among both
    process_of(run.generation.engines.actors[0]).kill()  # whose prompts the other one answers, till it is replaced
    counted = run.generation.metrics()["generation/prompts_retried"]
    copied = [run.answers(of=copy) == expected and sorted(copy.missing)]
    counted_of_copy = run.generation.metrics()["generation/prompts_retried"] - counted
    core_process(process_of(run.generation.engines.actors[1])).kill()  # its actor goes on
    try:
        run.answers(of=copy)
    except WorkerDied as death:
        copied.append(str(death))
    run.bridge.refit()
    copied.append(run.answers(of=copy) == expected and sorted(copy.missing))
    _, alive = psutil.wait_procs(started, timeout=20)
    left = [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    in_the_end = run.generation.metrics()
    folders = run.generation.engines.call("__ray_call__", [(lambda _: vllm_sockets.folder(),)] * 2)
    made = [folder.exists() for folder in folders]
    run.close()
    return {
        "ended": ended,
        "folders": made + [folder.exists() for folder in folders],
        "equal": equal,
        "copied": copied,
        "retried of the copy": counted_of_copy,
        "version": refit.version,
        "retries": refit.retries,
        "started": len(started),
        "left": left,
        **in_the_end,
    }


@pytest.mark.long
def test_of_two_engines_under_ray_one_is_killed(tiny_overrides):
    """Its prompts are asked again of both; nothing that it started outlives it. Before, what three threads ask is
    answered side by side; after, a copy does without another one that is killed, until that is replaced, and says so
    when the core of the last one dies.
    """
    seen = under_ray("kill_one_of_two", tiny_overrides)
    assert seen["started"] > 0
    assert seen["retried of the copy"] == len(TEXTS) / 2
    assert 0 < seen.pop("generation/prompts_retried") - seen.pop("retried of the copy") <= len(TEXTS) / 2
    assert seen.pop("ended") == ["short", "long", "long"]
    assert seen.pop("folders") == [True, True, False, False]
    assert seen.pop("copied") == [[0], "no engine is there: the run replaces them at its next refit", []]
    expected = {"equal": True, "version": 1, "retries": 0, "left": [], "generation/engine_restarts": 3}
    assert seen == expected | {"started": seen["started"]}


def kill_one_in_turns(overrides: list[str]) -> dict[str, object]:
    return lose_one_in_turns(overrides, lambda actor: process_of(actor).kill)


def break_one_in_turns(overrides: list[str]) -> dict[str, object]:
    """Its process lives, and would take a refit."""
    import ray

    def break_(engine: VllmEngine) -> None:
        def fails(*_):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        engine.core.llm.apply_model(lambda model: setattr(model, "broken", model.register_forward_pre_hook(fails)))

    return lose_one_in_turns(overrides, lambda actor: ray.get(actor.__ray_call__.remote(break_)))


def lose_one_in_turns(overrides: list[str], lose: Callable[[Any], Any]) -> dict[str, object]:
    """Two engines that have a GPU's memory in turns with two ranks, as far as that can be here, one of them lost."""
    turns = ("policy.generation.colocated.enabled=true", "policy.megatron_cfg.offload_between_phases=true", SLEEPS)
    of_two = ("cluster.backend=ray", "cluster.generation_engines=2", "cluster.train_ranks=2")
    run = Run((*overrides, *of_two, *turns, WAVES, "policy.train_micro_batch_size=32"))
    expected = run.answers()
    actor = run.generation.engines.actors[1]
    seen: dict[str, object] = {"equal": run.answers(lose(actor)) == expected}
    seen |= {"missing": sorted(run.generation.missing), "restarts": run.generation.engine_restarts}
    run.generation.finish_generation()
    run.generation.prepare_for_generation()
    seen |= {"retries": run.bridge.refit().retries, "missing after": sorted(run.generation.missing)}
    seen |= {"restarts after": run.generation.engine_restarts, "equal after": run.answers() == expected}
    run.close()
    return seen


@pytest.mark.long
@pytest.mark.parametrize("lost", ["kill_one_in_turns", "break_one_in_turns"])
def test_where_the_trainer_takes_turns_a_lost_engine_is_replaced_at_the_next_refit(tiny_overrides, lost):
    """The other one answers its prompts: the trainer, to send weights at once, would need the memory that it fills."""
    assert under_ray(lost, tiny_overrides) == {
        "equal": True,
        "missing": [1],
        "restarts": 0,
        "retries": 1,
        "missing after": [],
        "restarts after": 1,
        "equal after": True,
    }


def under_ray(name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """What the function of this file says, in a process of its own: Ray reads its token once."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [sys.executable, "-m", "tests.generation.test_faults", name, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=os.environ | token)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2:])))
