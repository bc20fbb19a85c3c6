"""Real engines that get a version from another one, each with its core in a process of its own."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import pytest

from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.batch import Prompt, collate_prompts
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation import engine_pool
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.refit.driver.full_or_delta import ModeChoice
from nemo_fp8rl.refit.reports import RefitReport
from nemo_fp8rl.workers import WorkerDied, Workers
from tests.conftest import RECIPES
from tests.generation.far_trainer import move_weights
from tests.generation.pair import FREE, TEXTS, outputs
from tests.generation.test_faults import ASYNC, core_process, look_until_it_is_replaced


class Engines(Workers):
    """Several engines of this process, which starts their cores one after the other; then they work at once."""

    def __init__(self, count: int) -> None:
        self.count, self.workers = count, [VllmEngine() for _ in range(count)]
        self.threads = ThreadPoolExecutor(count)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None) -> list[Any]:
        return [getattr(worker, method)(*of_it) for worker, of_it in zip(self.workers, arguments, strict=True)]

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        def outcome(engine: int) -> Any:
            try:
                return getattr(self.workers[engine], method)(*arguments[engine])
            except WorkerDied as death:
                return death

        return dict(zip(arguments, self.threads.map(outcome, arguments), strict=True))

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        for engine, of_it in arguments.items():
            try:
                yield from ((engine, item) for item in getattr(self.workers[engine], method)(*of_it))
            except WorkerDied as death:
                yield engine, death

    def end(self, index: int) -> None:
        self.workers[index].shutdown()

    def restart(self, index: int) -> None:
        self.end(index)
        self.workers[index] = VllmEngine()

    def ask(self, index: int, method: str, within: float) -> Any:
        return getattr(self.workers[index], method)()

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()


class Run:
    """A trainer and two engines, the second of which has the process that was started last."""

    def __init__(self, overrides: tuple[str, ...]) -> None:
        cfg = load(RECIPES / "tiny_cpu.yaml", overrides)
        self.cfg = replace(cfg, cluster=replace(cfg.cluster, generation_engines=2))
        tokenizer = PromptTokenizer(self.cfg.policy)
        tokens = [tuple(tokenizer.tokenizer(text).input_ids) for text in TEXTS]
        self.prompts = [Prompt(i, text, "", ids) for i, (text, ids) in enumerate(zip(TEXTS, tokens, strict=True))]
        self.policy = MegatronPolicy(self.cfg)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_pool, "start_workers", lambda *_, **__: Engines(2))
            self.generation = EnginePool(self.cfg)
        self.bridge = build_bridge(self.cfg, self.policy, self.generation)
        self.engines: list[VllmEngine] = self.generation.engines.workers  # type: ignore[attr-defined]

    def refit(self) -> RefitReport:
        if self.cfg.fp8_kv_cache:
            self.policy.calibrate_kv(collate_prompts(self.prompts, 0))
        return self.bridge.refit()

    def step(self) -> None:
        move_weights(self.policy)
        self.policy.steps_taken += 1

    def kill_the_second(self) -> float:
        """Kill its process, and return the seconds until it generates again."""
        core = core_process()
        core.kill()
        core.wait()
        start = time.monotonic()
        look_until_it_is_replaced(self.generation)
        return time.monotonic() - start

    def answers(self, engine: int) -> Any:
        ids = [prompt.token_ids for prompt in self.prompts]
        return outputs(self.engines[engine].generate(ids, range(len(ids)), FREE), same_batches=False)

    def close(self) -> None:
        self.generation.shutdown()
        self.policy.shutdown()


@pytest.fixture(scope="module")
def run(tiny_overrides):
    keys = ASYNC, "cluster.max_engine_restarts=10", "policy.generation.vllm_cfg.kv_cache_dtype=fp8"
    run = Run((*tiny_overrides, *keys))
    yield run
    run.close()


def test_a_killed_engine_is_brought_back_by_its_peer_after_the_trainer_stepped(run, caplog):
    """The peer answers meanwhile."""
    run.refit()
    before, meanwhile, is_back = run.answers(0), [], Event()

    def ask() -> None:
        while not is_back.is_set():
            meanwhile.append(run.answers(0))

    asking = Thread(target=ask)
    run.step()
    asking.start()
    run.kill_the_second()
    is_back.set()
    asking.join()
    version = run.bridge.version
    assert caplog.messages[-1] == f"engine 1 got version {version} from engine 0"
    assert [engine.policy_version for engine in run.engines] == [version] * 2
    assert run.answers(1) == before
    assert len(meanwhile) > 2 and all(answers == before for answers in meanwhile)
    run.refit()
    assert run.answers(1) == run.answers(0) != before


@pytest.mark.long
def test_ranks_of_tensor_parallel_engines_give_each_to_its_like(tiny_overrides):
    run = Run((*tiny_overrides, ASYNC, "policy.generation.vllm_cfg.tensor_parallel_size=2"))
    run.refit()
    before = run.answers(0)
    run.step()
    run.kill_the_second()
    assert run.answers(1) == run.answers(0) == before
    run.refit()
    assert run.answers(1) == run.answers(0) != before
    run.close()


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_of_two_engines_on_a_faked_machine_one_gets_each_version_from_the_other(run, mode, monkeypatch):
    """Faked: the engines say that they are on another machine than the trainer."""
    monkeypatch.setattr(run.generation, "domains", lambda engines: {engine: ["another"] for engine in engines})
    monkeypatch.setattr(run.bridge, "choice", ModeChoice(mode))
    monkeypatch.setattr(run.bridge.links, "domains", {0: ["another"], 1: ["another"]})
    run.refit()
    for _ in range(3):
        before = run.answers(0)
        run.step()
        report = run.refit()
        assert (report.between_machines, report.retries) == (1 / 2, 0)
        assert run.answers(1) == run.answers(0) != before
    assert report.delta == (mode == "delta")
    assert run.bridge.links.peers.leaders == {1: 0}
    run.step()
    run.kill_the_second()
    assert run.answers(1) == run.answers(0)
    assert run.refit().retries == 0
    assert run.answers(1) == run.answers(0)
