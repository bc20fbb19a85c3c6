"""Refits while answers are generated: each token comes from the version that it names, and from no half-written one.

The core is a process of its own. The trainer keeps the weights of every version, so that each token can be compared
with the log-prob that the trainer gives under the token's own version.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from threading import Event, Thread

import pytest
import torch

from nemo_fp8rl.batch import Completion, Prompt, collate
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.interface import Sampling
from tests.conftest import RECIPES
from tests.generation.pair import FREE, Pair

IN_FLIGHT = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "cluster.max_engine_restarts=10",
)
RECOMPUTE = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"
LONG = replace(FREE, num_generations=2, max_new_tokens=40, stop_token_ids=())
NEAR = 1e-5
"""The largest distance of a token's log-prob between engine and trainer. Another version is farther (`move`)."""


class Flight(Pair):
    """A pair whose versions can be compared with again. weights: the trainer's parameters by version."""

    def __init__(self, *overrides: str) -> None:
        super().__init__(load(RECIPES / "tiny_cpu.yaml", overrides))
        self.weights: dict[int, list[torch.Tensor]] = {}
        self.random, self.is_enough = random.Random(0), Event()

    def move(self) -> None:
        """Change the trainer's weights, far enough that two versions are told apart."""
        generator = torch.Generator().manual_seed(len(self.weights))
        with torch.no_grad():
            for parameter in self.worker.model.parameters():
                parameter.add_(0.2 * parameter * torch.randn(parameter.shape, generator=generator))

    def refit(self):
        report = super().refit()
        self.weights[report.version] = [parameter.detach().clone() for parameter in self.worker.model.parameters()]
        return report

    def trainer_logprobs(self, version: int, completions: list[Completion]) -> list[torch.Tensor]:
        """What the trainer gives each token of these answers under a version."""
        now = [parameter.detach().clone() for parameter in self.worker.model.parameters()]
        self.load(self.weights[version])
        batch = collate([self.asked[id(c)] for c in completions], completions, 0)
        logprobs = self.worker.logprobs(batch)
        self.load(now)
        starts = [len(self.asked[id(c)].token_ids) for c in completions]
        return [row[s : s + len(c.token_ids)] for row, s, c in zip(logprobs, starts, completions, strict=True)]

    def load(self, weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, content in zip(self.worker.model.parameters(), weights, strict=True):
                parameter.copy_(content)

    def begin(self, prompts: list[Prompt] | None = None, sampling: Sampling = LONG) -> Thread:
        """A thread that asks for answers, round after round until `is_enough`, into `answers`."""
        self.answers: list[Completion] = []
        self.asked: dict[int, Prompt] = {}
        self.failure: BaseException | None = None
        prompts = prompts or self.prompts
        self.is_enough.clear()

        def ask() -> None:
            try:
                for round_ in count():
                    seeds = [1000 * round_ + prompt.index for prompt in prompts]
                    groups = self.generation.generate([p.token_ids for p in prompts], seeds, sampling)
                    for prompt, group in zip(prompts, groups, strict=True):
                        self.answers += group
                        self.asked |= {id(completion): prompt for completion in group}
                    if self.is_enough.is_set():
                        return
            except BaseException as failure:
                self.failure = failure

        thread = Thread(target=ask)
        thread.start()
        return thread

    def end(self, thread: Thread) -> None:
        self.is_enough.set()
        thread.join()
        if self.failure is not None:
            raise self.failure

    def distances(self, shift: int = 0) -> list[float]:
        """Of each token's log-prob from the trainer's, under the version that the token `shift` before it names."""
        found: list[float] = []
        for version in self.weights:
            of_version = [c for c in self.answers if version in c.token_versions]
            if of_version:
                for completion, logprobs in zip(of_version, self.trainer_logprobs(version, of_version), strict=True):
                    labels = completion.token_versions
                    labels = labels[:1] * shift + labels[: len(labels) - shift]
                    pairs = zip(labels, completion.logprobs, logprobs.tolist(), strict=True)
                    found += [abs(engine - trainer) for label, engine, trainer in pairs if label == version]
        return found


@pytest.fixture(scope="module")
def recomputing(tiny_overrides) -> Iterator[Flight]:
    flight = Flight(*tiny_overrides, *IN_FLIGHT, RECOMPUTE)
    flight.refit()
    yield flight
    flight.close()


def test_every_token_is_of_the_version_that_it_names(recomputing):
    """50 refits at random moments, with the keys of answers in progress computed again."""
    flight = recomputing
    thread, first = flight.begin(), flight.bridge.version
    while flight.bridge.version < first + 50:
        flight.move()
        time.sleep(flight.random.uniform(0, 0.1))
        flight.refit()
    flight.end(thread)
    versions = [completion.token_versions for completion in flight.answers]
    assert all(len(v) == len(c.token_ids) for v, c in zip(versions, flight.answers, strict=True))
    assert all(list(v) == sorted(v) and c.policy_version <= v[0] for v, c in zip(versions, flight.answers, strict=True))
    assert len({version for of in versions for version in of}) > 40
    switches = sum(a != b for of in versions for a, b in pairwise(of))
    assert switches > 200
    found = flight.distances()
    assert len(found) == sum(map(len, versions))
    assert max(found) < NEAR
    wrong = sum(distance > NEAR for distance in flight.distances(shift=1))
    assert wrong > 0.9 * switches
