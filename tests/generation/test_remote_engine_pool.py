"""A copy of the driver's side of generation, asked before engines have weights, with fakes in place of the engines."""

import pickle
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.generation import engine_client
from nemo_fp8rl.generation.engine_client import RemoteEnginePool
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.workers import WorkerDied

PROMPTS = [(1,), (2,), (3,), (4,)]
NONE_YET = [-1, -1]


class FakeEngines:
    """Two engines. versions: what they hold when they are looked at; None: one that does not say."""

    def __init__(self, *versions: list[int | None]) -> None:
        self.count, self.versions, self.looks, self.renewed = 2, list(versions), 0, set[int]()
        self.asked: list[set[int]] = []

    def ask(self, engine: int, method: str, within: float) -> int | None:
        assert method == "generating_version"
        self.looks += 1
        held = self.versions[0][engine]
        if engine == self.count - 1 and len(self.versions) > 1:
            self.versions.pop(0)
        return held

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None
    ) -> Iterator[tuple[int, Any]]:
        self.asked.append(set(arguments))
        for engine, (prompts, *_) in arguments.items():
            if (self.versions[0][engine] or 0) < 0:
                raise RefitError("this engine has not received weights that were committed: refit before generating")
            for position in range(len(prompts)):
                yield engine, (position, [Completion((9,), (0.0,), "stop", 0)])

    def renew(self, engine: int) -> None:
        self.renewed.add(engine)


def copy_of(engines: FakeEngines, seconds: float = 60.0) -> RemoteEnginePool:
    """Return what the process of NeMo RL's collector gets."""
    pool = object.__new__(EnginePool)
    cluster = SimpleNamespace(generation_engines=2, engine_timeout_seconds=seconds)
    pool.cfg, pool.engines = SimpleNamespace(cluster=cluster), engines  # type: ignore[assignment]
    copy: RemoteEnginePool = pickle.loads(pickle.dumps(pool))
    return copy


def answers(copy: RemoteEnginePool) -> int:
    return sum(map(len, copy.generate(PROMPTS, range(len(PROMPTS)), Sampling(1, 8, 1.0, ()))))


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(engine_client, "HEALTH_CHECK_SECONDS", 0.001)


def test_a_copy_that_is_asked_before_the_first_refit_waits_for_it():
    copy = copy_of(FakeEngines(NONE_YET, [None, -1], [3, 3]))
    assert answers(copy) == len(PROMPTS)
    assert copy.engines.asked == [{0, 1}] and copy.engines.renewed == {0}


def test_a_copy_looks_no_more_at_engines_once_one_has_answered():
    copy = copy_of(FakeEngines([0, 0]))
    answers(copy)
    looks = copy.engines.looks
    assert answers(copy) == len(PROMPTS) and copy.engines.looks == looks == 2


def test_a_copy_does_without_an_engine_that_commits_later():
    copy = copy_of(FakeEngines(NONE_YET, [0, -1], [0, -1], [0, 0]))
    for asked in ({0}, {0, 1}):
        assert answers(copy) == len(PROMPTS) and copy.engines.asked.pop() == asked


def test_a_copy_does_without_an_engine_that_has_not_said_whether_it_has_weights():
    copy = copy_of(FakeEngines(NONE_YET, [0, None], [0, -1], [0, 0]))
    for asked in ({0}, {0, 1}):
        assert answers(copy) == len(PROMPTS) and copy.engines.asked.pop() == asked


def test_a_copy_whose_engines_get_no_weights_says_so_and_the_next_call_does_not_wait_again():
    copy, looks = copy_of(FakeEngines(NONE_YET), 0.2), []
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"no engine had weights 0\.2 seconds after .* says of its first refit"):
            answers(copy)
        looks.append(copy.engines.looks)
    assert looks[1] == looks[0] + 2  # one at each engine


def test_between_versions_a_copy_is_refused_as_before():
    copy = copy_of(FakeEngines([0, 0]))
    answers(copy)
    copy.engines.versions = [NONE_YET]
    with pytest.raises(RefitError):
        answers(copy)
