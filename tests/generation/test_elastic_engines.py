"""Engines that join, leave and die while prompts are asked and versions are sent.

The pool, the bridge, the links and the supervisor of places are the package's own. Fakes: engines in threads of this
process that answer a prompt by what they have in memory, and a trainer of a dict of weights (`memory_engine`).
"""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.generation import elastic_engines, engine_pool
from nemo_fp8rl.generation.answers.readers import AnswerReaders
from nemo_fp8rl.generation.elastic_engines import FILE, ElasticEngines
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink
from nemo_fp8rl.refit.reports import LoadReport
from nemo_fp8rl.refit.transport.shared_memory import domain
from nemo_fp8rl.workers import WorkerDied
from tests.generation.pair import GREEDY
from tests.refit.memory_engine import HOST, MemoryEngine, MemoryTrainer, as_whole, bf16, fp8, random_weights, split

PARTS = [fp8("up", 128, 256), fp8("down", 256, 128), bf16("norm", 64)]
LAYOUT = split(PARTS, 2, 1, replicate=True)
PATIENCE = 60.0
"""Seconds that nothing here takes; a test that waits so long hangs."""


def digest_of(wholes: Mapping[str, Content]) -> int:
    found = hashlib.sha256()
    for name in sorted(wholes):
        for tensor in wholes[name].tensors:
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(found.digest()[:6])


class FakeEngine(MemoryEngine):
    """Answers a prompt by the prompt and the digest of its memory, after a moment.

    repacked: names of the tensors that it keeps in a form of its own, and so cannot give to another engine
    """

    repacked = frozenset[str]()

    def __init__(self) -> None:
        super().__init__(LAYOUT, self.repacked)
        self.readers, self.is_set_up = AnswerReaders(), False

    def kill(self) -> None:
        super().kill()
        self.readers.look_again()

    def begin(self) -> int:
        self.check()
        if self.policy_version < 0:
            raise RefitError("this engine has not received weights that were committed: refit before generating")
        return self.policy_version

    def stream(self, prompts: Sequence[Any], seeds: Sequence[int], *_: Any) -> Iterator[tuple[int, list[Completion]]]:
        may_begin = lambda: self.policy_version >= 0 or self.died  # noqa: E731
        with self.readers.count_reader(self.begin, may_begin, PATIENCE) as version:
            for position, prompt in enumerate(prompts):
                before = digest_of(self.memory())
                time.sleep(0.001)
                self.check()
                tokens = (*prompt, seeds[position], before, digest_of(self.memory()))
                yield position, [Completion(tokens, (), "stop", version)]

    def fence(self) -> int:
        self.check()
        self.policy_version = -1
        self.readers.wait_for_others()
        self.check()
        return self.loaded_version

    def commit(self, version: int) -> None:
        super().commit(version)
        self.readers.look_again()

    def load_version(self, version: int, *how: bool) -> LoadReport | RefitError:
        try:
            return super().load(version, *how, lambda: None)
        except RefitError as refusal:
            self.check()
            return refusal

    def connect(self, links: Any, addresses: Any, token: str, timeout: float) -> None:
        self.check()
        for number, rank in enumerate(self.ranks):
            columns = [row[number] for row in addresses], [row[number] for row in links.routes]
            rank.links = [IncomingLink(end, route) for end, route in zip(*columns, strict=True) if end is not None]

    def offer(self, engine: int, links: Any, transport: Any, token: str, timeout: float) -> Any:
        ranks = zip(self.ranks, *links, strict=True)
        return [rank.for_peers.offer(engine, *of_rank, transport, HOST, token, timeout) for rank, *of_rank in ranks]

    def withdraw(self, engine: int) -> None:
        for rank in self.ranks:
            rank.for_peers.withdraw(engine)

    def start_push(self, version: int, engines: Collection[int], how: Mapping[str, bool]) -> None:
        if self.loaded_version != version:
            raise RefitError(f"this engine has version {self.loaded_version}")
        for rank in self.ranks:
            rank.for_peers.start_push(rank.contents(), version, engines, **how)

    def finish_push(self) -> Any:
        return [rank.for_peers.finish_push() for rank in self.ranks]

    def set_up(self, *_: Any) -> None:
        self.is_set_up = True

    def answer(self, method: str, *arguments: Any) -> Any:
        self.check()
        if not self.is_set_up and method not in ("setup", "shutdown"):
            raise AttributeError("'VllmEngine' object has no attribute 'core'")
        methods: dict[str, Callable[..., Any]] = {
            "setup": self.set_up,
            "shutdown": self.kill,
            "load": self.load_version,
            "stored_parts": lambda: [list(rank.parts.values()) for rank in self.ranks],
            "domains": lambda: [domain()] * len(self.ranks),
            "check_health": lambda: None,
            "count_retried_prompts": lambda: 0,
        }
        return methods.get(method, getattr(self, method, None))(*arguments)


class FakeEngineProcesses:
    """`Workers` of FakeEngines. no_place: places at which none can be started; start: seconds that a start takes."""

    def __init__(self, count: int, places: int) -> None:
        self.count, self.start = places, 0.01
        self.engines: list[FakeEngine | None] = [FakeEngine() for _ in range(count)] + [None] * (places - count)
        self.no_place, self.starts = set[int](), list[int]()

    def call(self, method: str, arguments: Sequence[Any], timeout: float | None = None) -> list[Any]:
        return [self._answer(i, method, values) for i, values in enumerate(arguments)]

    def outcomes(self, method: str, arguments: Mapping[int, Any], timeout: float | None = None) -> dict[int, Any]:
        if not arguments:
            return {}

        def answer(engine: int) -> Any:
            try:
                return self._answer(engine, method, arguments[engine])
            except WorkerDied as death:
                return death

        with ThreadPoolExecutor(len(arguments)) as threads:
            return dict(zip(arguments, threads.map(answer, arguments), strict=True))

    def stream(
        self, method: str, arguments: Mapping[int, Any], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        items = SimpleQueue[tuple[int, Any]]()

        def answer(engine: int) -> None:
            """As an actor does, which does not wait until its answers are read."""
            try:
                for item in self.engines[engine].stream(*arguments[engine]):
                    items.put((engine, item))
                items.put((engine, None))
            except Exception as error:
                items.put((engine, error))

        left = set(arguments)
        for engine in left:
            threading.Thread(target=answer, args=(engine,), daemon=True).start()
        while left:
            engine, item = items.get(timeout=PATIENCE)
            if isinstance(item, tuple):
                yield engine, item
                continue
            left.remove(engine)
            if isinstance(item, WorkerDied):
                yield engine, item
            elif item is not None:
                raise item

    def end(self, engine: int) -> None:
        self.engines[engine].kill()

    retire = end

    def restart(self, engine: int) -> None:
        self.starts.append(engine)
        self.engines[engine] = FakeEngine()
        time.sleep(self.start)
        if engine in self.no_place:
            raise UserError(f"Ray has started no process for generation-{engine}")

    def ask(self, engine: int, method: str, within: float) -> Any:
        try:
            return self._answer(engine, method, ())
        except WorkerDied:
            return None

    def shutdown(self) -> None:
        for engine in filter(None, self.engines):
            engine.kill()

    def _answer(self, engine: int, method: str, arguments: Any) -> Any:
        return self.engines[engine].answer(method, *arguments)


class Run:
    """A trainer, its engines, and threads that ask."""

    def __init__(self, cfg: Any, elastic: bool = True) -> None:
        cluster = cfg.cluster
        self.processes = FakeEngineProcesses(cluster.generation_engines, cluster.most_engines)
        self.trainer = MemoryTrainer(random_weights(PARTS), split(PARTS, 2, 0, replicate=False))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_pool, "start_workers", lambda *_, **__: self.processes)
            self.pool = EnginePool(cfg)
        self.bridge = RefitBridge(self.trainer, self.pool, mode="auto", bucket_bytes=30_000)
        self.engines = ElasticEngines(self.pool, self.bridge)
        self.digests = dict[int, int]()
        self.asked, self.answers, self.failures = 0, dict[int, list[Completion]](), list[BaseException]()
        self.counting, self.is_over, self.threads = threading.Lock(), False, list[threading.Thread]()
        self.refit()
        if elastic:
            self.engines.__enter__()

    def step(self) -> None:
        moved = {name: weight * (1 + 0.1 * torch.rand(())) for name, weight in self.trainer.weights.items()}
        self.trainer.step(**moved)

    def refit(self) -> None:
        with self.trainer.hold_weights():
            self.digests[self.bridge.version + 1] = digest_of(as_whole(PARTS, self.trainer.weights, "pow2"))
        self.bridge.refit()

    def ask(self, count: int = 6) -> None:
        with self.counting:
            first, self.asked = self.asked, self.asked + count
        prompts = [(first + i,) for i in range(count)]
        groups = self.pool.generate(prompts, [1000 + i for (i,) in prompts], GREEDY)
        assert len(groups) == count
        with self.counting:
            for (prompt,), (completion,) in zip(prompts, groups, strict=True):
                self.answers.setdefault(prompt, []).append(completion)

    def begin(self, work: Callable[[], None]) -> None:
        """Have a thread do it again and again."""

        def go_on() -> None:
            try:
                while not self.is_over:
                    work()
            except BaseException as error:
                self.failures.append(error)

        self.threads.append(threading.Thread(target=go_on, daemon=True))
        self.threads[-1].start()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, (self.engines.follow(NOWHERE), self.pool.present, self.pool.missing)
            time.sleep(0.005)

    def join_threads(self) -> None:
        self.is_over = True
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert self.failures == []

    def assert_all_sound(self) -> None:
        """Every prompt is answered once, from one version that was committed, and from that version's bytes."""
        assert sorted(self.answers) == list(range(self.asked))
        for prompt, given in self.answers.items():
            (completion,) = given
            version = completion.policy_version
            assert completion.token_ids == (prompt, 1000 + prompt, self.digests[version], self.digests[version])

    def close(self) -> None:
        self.is_over = True
        self.engines.__exit__()
        self.pool.shutdown()
        self.trainer.close()


class Nowhere:
    def __truediv__(self, name: str) -> Any:
        def absent(**_: Any) -> str:
            raise FileNotFoundError

        return SimpleNamespace(read_text=absent)


NOWHERE: Any = Nowhere()


@pytest.fixture
def make(recipe, monkeypatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setattr(elastic_engines, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(elastic_engines, "LOOK_SECONDS", 0.02)
    runs: list[Run] = []

    def start(first: int = 2, least: int = 1, most: int = 4, restarts: int = 1000, **how: Any) -> Run:
        numbers = {"generation_engines": first, "min_generation_engines": least, "max_generation_engines": most}
        keys = [f"cluster.{name}={number}" for name, number in numbers.items()]
        runs.append(Run(recipe("cluster.backend=ray", *keys, f"cluster.max_engine_restarts={restarts}"), **how))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def serves(run: Run, engines: Collection[int]) -> bool:
    return run.pool.serving_engines() == set(engines) and not run.engines.joining and not run.engines.ending


@pytest.mark.parametrize("seed", range(3))
def test_under_random_joins_leaves_and_kills_every_prompt_is_answered_once_from_a_committed_version(make, seed):
    run, choose = make(), random.Random(seed)
    torch.manual_seed(seed)

    def train() -> None:
        run.step()
        time.sleep(choose.random() * 0.05)  # an engine that joins now waits for the refit
        try:
            run.refit()
        except RefitError as error:  # of the only engine, killed twice in one refit; the next one brings it back
            assert "failed twice: the engine was killed" in str(error)
        time.sleep(choose.random() * 0.1)

    for _ in range(3):
        run.begin(run.ask)
    run.begin(train)
    for number in range(24):
        event = "leave" if number % 3 == 0 else choose.choice(("join", "leave", "kill"))
        if event == "kill":
            engine = choose.choice(sorted(run.pool.present))
            run.processes.engines[engine].kill()
        else:
            wanted = run.engines.wanted + (1 if event == "join" else -1)
            run.engines.want(min(max(wanted, 1), 4))
        if number == 8:
            run.processes.no_place.add(3)
        time.sleep(choose.random() * 0.15)
    run.processes.no_place.clear()
    run.engines.want(3)
    run.until(lambda: len(run.pool.present) == 3 and serves(run, run.pool.present))
    answered = run.asked
    run.until(lambda: run.asked > answered + 30)
    run.join_threads()
    run.assert_all_sound()
    run.refit()
    assert {run.processes.engines[i].policy_version for i in run.pool.present} == {run.bridge.version}
    assert len({c.policy_version for (c,) in run.answers.values()}) > 5
    assert run.engines.joined and run.engines.left
    assert run.pool.in_flight == [0] * 4


def test_an_engine_that_joins_gets_the_committed_version_and_prompts(make):
    run = make()
    run.engines.want(3)
    run.until(lambda: serves(run, {0, 1, 2}))
    assert run.processes.engines[2].policy_version == run.bridge.version == 0
    run.ask(9)
    run.assert_all_sound()
    wanted, joined = run.engines.follow(NOWHERE), "engine 2 joined after"
    assert wanted[0].startswith(joined) and wanted[0].endswith("with version 0")


def test_an_engine_that_joins_after_the_weights_moved_gets_the_committed_version_from_another_one(make):
    run = make()
    run.step()
    run.engines.want(3)
    run.until(lambda: serves(run, {0, 1, 2}))
    assert run.processes.engines[2].policy_version == run.bridge.version == 0
    run.ask(9)
    run.refit()
    run.ask(9)
    run.assert_all_sound()
    assert {c.policy_version for (c,) in run.answers.values()} == {0, 1}


def test_an_engine_to_which_nobody_can_give_the_version_waits_for_the_next_refit_without_prompts(make, monkeypatch):
    monkeypatch.setattr(FakeEngine, "repacked", frozenset({PARTS[0].name}))
    run = make()
    run.step()
    run.engines.want(3)
    run.until(lambda: run.pool.present == {0, 1, 2} and not run.engines.joining)
    assert run.pool.missing == {2, 3}
    run.ask(9)
    assert run.engines.metrics() == {"generation/engines": 2}
    run.refit()
    assert serves(run, {0, 1, 2})
    run.ask(9)
    run.assert_all_sound()
    assert {c.policy_version for (c,) in run.answers.values()} == {0, 1}


def test_neither_prompts_nor_refits_wait_for_an_engine_that_starts(make):
    run = make()
    run.processes.start = PATIENCE / 4
    run.engines.want(3)
    start = time.monotonic()
    run.until(lambda: run.processes.starts == [2])
    for _ in range(2):
        run.ask()
        run.step()
        run.refit()
    assert time.monotonic() - start < run.processes.start
    run.assert_all_sound()


def test_an_engine_that_leaves_answers_what_it_has(make, monkeypatch):
    run, go_on, given = make(), threading.Event(), []
    stream = FakeEngine.stream

    def slow(engine: FakeEngine, *arguments: Any) -> Iterator[Any]:
        for item in stream(engine, *arguments):
            if engine is run.processes.engines[1]:
                assert go_on.wait(PATIENCE)
            yield item

    monkeypatch.setattr(FakeEngine, "stream", slow)
    leaver = run.processes.engines[1]
    threading.Thread(target=lambda: given.append(run.ask()), daemon=True).start()
    run.until(lambda: run.pool.in_flight[1] > 0)
    run.engines.want(1)
    run.until(lambda: run.pool.leaving == {1})
    run.ask()  # of the other one alone
    assert not leaver.died and not given
    go_on.set()
    run.until(lambda: serves(run, {0}) and bool(given))
    assert leaver.died and run.pool.prompts_retried == 0
    run.refit()
    run.assert_all_sound()


def test_an_engine_that_dies_as_it_leaves_is_not_replaced(make, monkeypatch):
    run, asking = make(first=3), []
    stream = FakeEngine.stream

    def slow(engine: FakeEngine, *arguments: Any) -> Iterator[Any]:
        for item in stream(engine, *arguments):
            run.until(lambda: engine.died or engine is not run.processes.engines[2])
            yield item
            engine.check()

    monkeypatch.setattr(FakeEngine, "stream", slow)
    leaver = run.processes.engines[2]
    run.begin(lambda: asking.append(run.ask()))
    run.until(lambda: run.pool.in_flight[2] > 0)
    run.engines.want(2)
    run.until(lambda: run.pool.leaving == {2})
    leaver.kill()
    run.until(lambda: serves(run, {0, 1}))
    assert (run.engines.wanted, run.engines.left, run.engines.lost, run.pool.engine_restarts) == (2, 1, 0, 0)
    run.join_threads()
    run.assert_all_sound()


def test_an_engine_that_dies_leaves_its_prompts_to_the_others_and_returns(make):
    run = make()
    run.processes.start = 0.3
    run.processes.engines[1].kill()
    run.ask()
    assert run.pool.serving_engines() == {0}
    run.until(lambda: serves(run, {0, 1}))
    run.assert_all_sound()
    assert run.pool.metrics()["generation/engine_restarts"] == 1
    died, joined = run.engines.follow(NOWHERE)
    assert died == "engine 1 died (the engine was killed); another one starts in its place"
    assert joined.startswith("engine 1 joined")


def test_nothing_is_asked_of_the_engine_that_starts_in_a_dead_ones_place(make):
    run = make(elastic=False)
    run.pool.report_losses_to(lambda engine, death, returns: run.processes.restart(engine))
    run.processes.engines[1].kill()
    run.ask()
    assert run.pool.serving_engines() == {0} and not run.processes.engines[1].died
    run.assert_all_sound()


@pytest.mark.parametrize("when", ["load", "commit"])
def test_an_engine_that_dies_in_a_refit_leaves_it_to_the_others(make, monkeypatch, when):
    run = make()
    run.processes.start = 0.3
    method = "load_version" if when == "load" else "commit"
    does = getattr(FakeEngine, method)

    def dies(engine: FakeEngine, *arguments: Any) -> Any:
        if engine is run.processes.engines[1]:
            engine.kill()
            engine.check()
        return does(engine, *arguments)

    monkeypatch.setattr(FakeEngine, method, dies)
    run.step()
    run.refit()
    monkeypatch.setattr(FakeEngine, method, does)
    assert run.pool.serving_engines() == {0}
    run.ask()
    run.until(lambda: serves(run, {0, 1}))
    assert run.processes.engines[1].policy_version == run.bridge.version == 1
    run.assert_all_sound()


def test_the_last_engine_is_started_again_before_anything_goes_on(make):
    run = make(first=2, least=2)
    run.processes.engines[1].kill()
    run.ask()
    assert run.pool.serving_engines() == {0, 1} and run.engines.lost == 0
    run.assert_all_sound()


def test_an_engine_that_dies_too_often_stays_away_where_enough_are_left(make):
    run = make(restarts=1)
    for _ in range(2):
        run.processes.engines[1].kill()
        run.ask()
        run.until(lambda: not run.engines.joining and (run.engines.wanted == 1 or serves(run, {0, 1})))
    assert serves(run, {0}) and run.engines.wanted == 1
    said = run.engines.follow(NOWHERE)
    assert said[-1].endswith("its place stays empty after 1 restarts (cluster.max_engine_restarts)")
    run.engines.want(2)
    run.until(lambda: serves(run, {0, 1}))


def test_a_place_where_none_can_start_is_tried_until_one_can(make):
    run = make(most=2)
    run.processes.no_place.add(1)
    run.processes.engines[1].kill()
    run.ask()
    run.until(lambda: len(run.processes.starts) > 3)
    assert [line for line in run.engines.follow(NOWHERE) if "did not join" in line] == [
        "engine 1 did not join (Ray has started no process for generation-1); it is tried again every 0.05 s"
    ]
    run.processes.no_place.clear()
    run.until(lambda: serves(run, {0, 1}))
    run.refit()
    run.ask()
    run.assert_all_sound()


def test_another_place_is_taken_meanwhile(make):
    run = make()
    run.processes.no_place.add(1)
    run.processes.engines[1].kill()
    run.ask()
    run.until(lambda: serves(run, {0, 2}))
    run.ask()
    run.assert_all_sound()


def test_the_number_in_the_folder_of_the_run_is_followed_once(make, tmp_path):
    run = make()
    assert run.engines.follow(tmp_path) == []
    (tmp_path / FILE).write_text("3\n")
    assert run.engines.follow(tmp_path) == ["engines: 3 wanted"]
    run.until(lambda: serves(run, {0, 1, 2}))
    run.engines.follow(tmp_path)
    (tmp_path / FILE).write_text("7\n")
    (said,) = run.engines.follow(tmp_path)
    assert said.startswith(f"{tmp_path / FILE} is not followed: 7 engines: this run has 1 to 4 (cluster.min_generation")
    (tmp_path / FILE).write_text("three\n")
    assert "'three' is no number of engines: give a whole number" in run.engines.follow(tmp_path)[0]
    assert run.engines.follow(tmp_path) == [] and run.engines.wanted == 3


def test_a_trainer_that_is_found_dead_leaves_engines_at_the_last_version(make):
    run = make()
    run.ask()
    run.trainer.kill()
    run.ask()  # between two refits nothing changes
    with pytest.raises(WorkerDied):
        run.bridge.refit()
    assert {engine.policy_version for engine in run.processes.engines[:2]} == {0}
    run.ask()
    run.assert_all_sound()


def test_a_trainer_that_dies_as_engines_load_leaves_them_fenced(make):
    run = make()
    run.step()
    run.trainer.reading = run.trainer.kill
    with pytest.raises((WorkerDied, RefitError)):
        run.bridge.refit()
    assert {engine.policy_version for engine in run.processes.engines[:2]} == {-1}
