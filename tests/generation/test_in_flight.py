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
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import core, vllm_compat
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.sender.push import Push
from tests.conftest import RECIPES
from tests.generation.pair import FREE, Pair
from tests.generation.test_faults import core_process

IN_FLIGHT = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "cluster.max_engine_restarts=10",
)
RECOMPUTE = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"
LONG = replace(FREE, num_generations=2, max_new_tokens=40, stop_token_ids=())
ROOM = ("policy.max_total_sequence_length=256", "policy.train_micro_batch_size=8")
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
                    is_last = self.is_enough.is_set()
                    seeds = [1000 * round_ + prompt.index for prompt in prompts]
                    groups = self.generation.generate([p.token_ids for p in prompts], seeds, sampling)
                    for prompt, group in zip(prompts, groups, strict=True):
                        self.answers += group
                        self.asked |= {id(completion): prompt for completion in group}
                    if is_last:
                        return
            except BaseException as failure:
                self.failure = failure

        thread = Thread(target=ask)
        thread.start()
        return thread

    @property
    def engine_now(self) -> VllmEngine:
        """The engine, which is another object after a restart."""
        return self.generation.engines.worker

    def end(self, thread: Thread) -> None:
        self.is_enough.set()
        thread.join()
        if self.failure is not None:
            raise self.failure

    def distances(self, answers: list[Completion] | None = None, shift: int = 0) -> list[float]:
        """Of each token's log-prob from the trainer's, under the version that the token `shift` before it names."""
        found: list[float] = []
        for version in self.weights:
            of_version = [c for c in answers or self.answers if version in c.token_versions]
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


add_whole = Push.add_whole


def add_damaged(self, piece, target, digest) -> None:
    """Send a piece with other bytes than those of its digest."""
    data = target.content.data.view(torch.uint8)
    data[(0,) * data.dim()] ^= 1
    add_whole(self, piece, target, digest)


def test_a_version_that_fails_its_check_gives_no_token_and_answers_go_on_from_the_next(recomputing, monkeypatch):
    flight = recomputing
    thread, before = flight.begin(), flight.bridge.version
    flight.move()
    with monkeypatch.context() as patch:
        patch.setattr(Push, "add_whole", add_damaged)
        with pytest.raises(RefitError, match=r"failed twice"):
            flight.bridge.refit()
    assert flight.engine_now.policy_version == -1
    count_of = len(flight.answers)
    time.sleep(1.0)
    assert thread.is_alive() and len(flight.answers) == count_of  # the engine stays paused
    report = flight.refit()
    assert report.version == before + 1
    flight.end(thread)
    assert {version for c in flight.answers for version in c.token_versions} <= {before, before + 1}
    assert max(flight.distances()) < NEAR


def test_an_engine_killed_in_a_refit_loses_no_answer(recomputing, monkeypatch):
    flight = recomputing
    thread, restarts = flight.begin(), flight.generation.engine_restarts
    load_weights = flight.generation.load

    def load_and_die(*arguments):
        monkeypatch.undo()
        core_process().kill()
        return load_weights(*arguments)

    monkeypatch.setattr(flight.generation, "load", load_and_die)
    time.sleep(0.2)
    flight.move()
    assert flight.refit().retries == 1
    flight.end(thread)
    assert flight.generation.engine_restarts == restarts + 1
    assert len(flight.answers) % (len(flight.prompts) * LONG.num_generations) == 0
    assert max(flight.distances()) < NEAR


@pytest.mark.long
def test_an_engine_killed_while_the_trainer_steps_answers_after_the_next_refit(recomputing):
    """It has lost its version, and the trainer has gone on."""
    flight = recomputing
    flight.move()
    flight.policy.steps_taken += 1
    thread, restarts = flight.begin(), flight.generation.engine_restarts
    while not any(flight.engine_now.readers._counts.values()):
        time.sleep(0.001)
    core_process().kill()
    while flight.generation.engine_restarts == restarts or flight.generation.missing:
        time.sleep(0.01)
    time.sleep(0.5)
    assert thread.is_alive() and not flight.answers
    flight.refit()
    flight.end(thread)
    assert {version for c in flight.answers for version in c.token_versions} == {flight.bridge.version}
    assert max(flight.distances()) < NEAR


@pytest.fixture(scope="module")
def keeping(tiny_overrides) -> Iterator[Flight]:
    flight = Flight(*tiny_overrides, *IN_FLIGHT, *ROOM)
    flight.refit()
    yield flight
    flight.close()


def ask_again(flight: Flight) -> tuple[list[Completion], list[Completion]]:
    """Ask a prompt longer than a page of the cache again while answers to it go on from the weights before a refit.

    Return (answers that went on, answers to the prompt asked again).
    """
    long = [Prompt(i, "", "", flight.prompts[0].token_ids * 30) for i in range(4)]
    assert len(long[0].token_ids) > flight.engine.core.llm.vllm_config.cache_config.block_size
    for _ in range(10):
        thread = flight.begin(long, replace(LONG, max_new_tokens=70))
        while not any(flight.engine.readers._counts.values()):
            time.sleep(0.001)
        time.sleep(0.1)
        flight.move()
        flight.refit()
        groups = flight.generation.generate(
            [p.token_ids for p in long], [50, 51, 52, 53], replace(LONG, max_new_tokens=8)
        )
        was_in_progress = thread.is_alive() and not flight.answers
        flight.end(thread)
        mixed = [c for c in flight.answers if {c.policy_version, flight.bridge.version} == {*c.token_versions}]
        again = [completion for group in groups for completion in group]
        flight.asked |= {id(c): prompt for prompt, group in zip(long, groups, strict=True) for c in group}
        if was_in_progress and mixed:
            return mixed, again
    raise AssertionError("no refit came between two tokens of an answer")


@pytest.mark.long
def test_kept_keys_are_read_by_the_answers_in_progress_alone(keeping):
    mixed, again = ask_again(keeping)
    assert {version for c in again for version in c.token_versions} == {keeping.bridge.version}
    assert max(keeping.distances(again)) < NEAR
    assert max(keeping.distances(mixed)) > NEAR  # the old keys stay, which the trainer has not
    cuts = [sum(version == c.policy_version for version in c.token_versions) for c in mixed]
    firsts = [
        replace(c, token_ids=c.token_ids[:n], logprobs=c.logprobs[:n], version_starts=())
        for c, n in zip(mixed, cuts, strict=True)
    ]
    keeping.asked |= {id(part): keeping.asked[id(c)] for part, c in zip(firsts, mixed, strict=True)}
    assert max(keeping.distances(firsts)) < NEAR


@pytest.mark.long
def test_without_the_salt_they_would_be_read_by_new_answers(keeping, monkeypatch):
    """So that the test above could fail."""
    monkeypatch.setattr(core, "_prompt", lambda request: {"prompt_token_ids": list(request.token_ids)})
    assert max(keeping.distances(ask_again(keeping)[1])) > NEAR


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("policy.generation.vllm_cfg.async_engine=false",), r"set policy\.generation\.vllm_cfg\.async_engine=true"),
        (("policy.generation.vllm_cfg.sleep_level=1",), r"policy\.generation\.vllm_cfg\.sleep_level=0"),
        (("policy.generation.vllm_cfg.kv_cache_dtype=fp8",), r"set grpo.*recompute_kv_cache_after_weight_updates=true"),
        (("policy.router_replay.enabled=true",), r"policy\.router_replay\.enabled=true: routers of several versions"),
    ],
)
def test_what_does_not_go_with_updates_in_flight_is_refused_by_key(overrides, message, tiny_overrides):
    with pytest.raises(UserError, match=message):
        load(RECIPES / "tiny_cpu.yaml", [*tiny_overrides, *IN_FLIGHT, *overrides])


def test_a_vllm_that_does_not_label_tokens_is_refused(monkeypatch):
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine.async_llm import AsyncLLM

    for holder in (AsyncLLM, EngineClient):
        monkeypatch.delattr(holder, "update_weight_version")
    with pytest.raises(UserError, match=r"does not tell from which weights a token was sampled; set it to false, or"):
        vllm_compat.check_updates_in_flight()
