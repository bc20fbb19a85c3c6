"""How prompts are divided among engines, with fakes in the place of engines that would need a process each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Barrier, BrokenBarrierError, Thread

import pytest

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.generation import engine_pool
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.workers import WorkerDied
from tests.generation.pair import GREEDY


class FakeWorkers:
    """Engines that answer a prompt with itself. dies: of an engine, the answers that it has left to give."""

    def __init__(self, count: int, dies: dict[int, int]) -> None:
        self.count, self.dies, self.asked, self.ended = count, dies, list[Counter[int]](), list[int]()

    def call(self, method: str, arguments: Sequence, timeout: float | None = None) -> list:
        return [None for _ in arguments]

    def outcomes(self, method: str, arguments: Mapping, timeout: float | None = None) -> dict:
        return dict.fromkeys(arguments)

    def end(self, engine: int) -> None:
        self.ended.append(engine)

    def restart(self, engine: int) -> None:
        self.dies.pop(engine, None)

    def stream(self, method: str, arguments: Mapping, timeout: float | None = None):
        self.asked.append(Counter({engine: len(prompts) for engine, (prompts, *_) in arguments.items()}))
        for engine, (prompts, seeds, _, _) in arguments.items():
            for position in reversed(range(len(prompts))):
                if self.dies.get(engine) == 0:
                    yield engine, WorkerDied("killed")
                    break
                if engine in self.dies:
                    self.dies[engine] -= 1
                yield engine, (position, [Completion((*prompts[position], seeds[position]), (), "stop", 1)])


@pytest.fixture
def engines(recipe, monkeypatch):
    def start(count: int, **dies: int) -> EnginePool:
        workers = FakeWorkers(count, {int(engine[1:]): answers for engine, answers in dies.items()})
        monkeypatch.setattr(engine_pool, "start_workers", lambda *_, **__: workers)
        cfg = recipe("cluster.backend=ray", f"cluster.generation_engines={count}")
        return EnginePool(cfg)

    return start


def answers(generation: EnginePool, count: int) -> list[tuple[int, ...]]:
    groups = generation.generate([(i, i) for i in range(count)], [100 + i for i in range(count)], GREEDY)
    return [completion.token_ids for (completion,) in groups]


@pytest.mark.parametrize(("prompts", "shares"), [(7, [3, 2, 2]), (2, [1, 1]), (6, [2, 2, 2]), (0, [])])
def test_prompts_are_divided_evenly_and_answered_in_order(engines, prompts, shares):
    generation = engines(3)
    assert answers(generation, prompts) == [(i, i, 100 + i) for i in range(prompts)]
    assert [list(asked.values()) for asked in generation.engines.asked] == ([shares] if shares else [])
    assert generation.in_flight == [0, 0, 0]


def test_an_engine_that_has_prompts_under_way_gets_fewer(engines):
    generation = engines(3)
    generation.in_flight = [4, 0, 1]
    answers(generation, 5)
    assert generation.engines.asked == [{1: 3, 2: 2}]
    assert generation.in_flight == [4, 0, 1]


def test_what_a_dead_engine_had_not_answered_goes_to_all_anew_and_is_counted(engines):
    generation = engines(2, e1=1)
    assert answers(generation, 8) == [(i, i, 100 + i) for i in range(8)]
    assert generation.engines.asked == [{0: 4, 1: 4}, {0: 2, 1: 1}]
    assert (generation.engine_restarts, generation.prompts_retried) == (1, 3)
    assert generation.in_flight == [0, 0]


class LookedAtTogether(set):
    """A set that two threads see as it is now, if they may look at the same time."""

    def __init__(self) -> None:
        self.both = Barrier(2)

    def __rsub__(self, other: set) -> set:
        left = other.difference(self)
        with suppress(BrokenBarrierError):
            self.both.wait(0.5)
        return left


def test_of_two_threads_that_lose_the_last_two_engines_one_replaces_its_own(engines, monkeypatch):
    """Where engines take turns with the trainer, an engine is left to the next refit as long as another one answers."""
    generation = engines(2, e0=0, e1=0)
    monkeypatch.setattr(EnginePool, "takes_turns", True)
    generation.missing = LookedAtTogether()
    losing = [Thread(target=generation._report_death, args=(engine, WorkerDied("killed"), 0)) for engine in range(2)]
    for thread in losing:
        thread.start()
    for thread in losing:
        thread.join(timeout=60)
    assert generation.engine_restarts == 1 and len(generation.missing) == 1
    assert generation.engines.ended == [*generation.missing], "its process would keep memory that the trainer needs"


def test_an_engine_that_fails_while_it_is_caught_up_is_replaced_once_more(engines):
    """The bridge has that done in the middle of `recover`."""
    generation = engines(2)

    def recover(engine, death, life, wait):
        assert generation.replace(engine, death, life)
        assert generation.replace(engine, WorkerDied("out of memory in the load"))
        generation.readmit(engine)
        return True

    generation.report_deaths_to(recover)
    assert generation._report_death(0, WorkerDied("killed"), life=0)
    assert (generation.engine_restarts, generation.lives, generation.missing) == (2, [2, 0], set())


def test_an_engine_that_was_replaced_meanwhile_is_not_ended(engines, monkeypatch):
    generation = engines(2)
    monkeypatch.setattr(EnginePool, "takes_turns", True)
    generation.lives[0] = 1
    assert generation._report_death(0, WorkerDied("killed"), life=0)
    assert (generation.engines.ended, generation.missing, generation.engine_restarts) == ([], set(), 0)


def test_a_death_that_a_recovery_has_made_good_replaces_nothing_in_a_refit(engines):
    generation = engines(2)
    generation.fence([0, 1])
    assert generation._report_death(0, WorkerDied("killed"), life=0)
    assert not generation.replace(0, WorkerDied("killed"))
    assert generation.engine_restarts == 1
    generation.fence([0, 1])
    assert generation.replace(0, WorkerDied("killed again"))
