"""Every engine commits a version or none does; what dies or breaks on the way is made good once, and counted."""

import errno
import gc
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.refit import message
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.refit.digest import WORD_SUM_PREFIX, word_sum_digest
from nemo_fp8rl.refit.driver.full_or_delta import RETRY_AFTER, ModeChoice
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Header
from nemo_fp8rl.refit.sender.weight_sender import MIN_DELTA_BYTES
from nemo_fp8rl.refit.transport import shared_memory
from nemo_fp8rl.refit.transport.double_buffer import Sender
from nemo_fp8rl.refit.transport.link import HOST, RECEIVER_SHARE, SENDER_SHARE, LinkError, ReceivingEnd
from nemo_fp8rl.workers import WorkerDied
from tests.refit.memory_engine import (
    TRANSPORTS,
    Hook,
    MemoryEngine,
    MemoryEngines,
    MemoryTrainer,
    Message,
    Tampered,
    as_whole,
    bf16,
    empty,
    fp8,
    random_weights,
    split,
)

UP, DOWN, NORM = "mlp.up_proj.weight", "mlp.down_proj.weight", "norm.weight"
PARTS = [fp8(UP, 256, 384), fp8(DOWN, 384, 300), bf16(NORM, 100), TensorPart.of("k_scale", torch.float32, ())]
NBYTES = sum(part.nbytes for part in PARTS)
QUANTIZED = [part for part in PARTS if bool(part.format)]
AT_ONCE = 5.0
"""Seconds that a refit may take where links wait for up to 20."""


class Run:
    """A trainer of two ranks, or of so many copies of two, two engines of two ranks, and the bridge."""

    def __init__(
        self,
        engines: int = 2,
        *,
        mode: Any = "full",
        verify: Any = "digest",
        repacked: str = "",
        to: torch.device = HOST,
        copies: int = 1,
        **how: Any,
    ) -> None:
        self.trainer = MemoryTrainer(random_weights(PARTS), split(PARTS, 2, 0, replicate=False) * copies, **how)
        layout = split(PARTS, 2, 1, replicate=True)
        self.engines = MemoryEngines(layout, engines, repacked=[repacked] if repacked else [], device=to)
        self.mode, self.verify = mode, verify
        named = {"transport": how["transport"]} if "transport" in how else {}
        self.bridge = RefitBridge(self.trainer, self.engines, mode=mode, verify=verify, bucket_bytes=30_000, **named)

    def step(self, share: float = 0.01) -> None:
        """Some of the smaller values are halved: scales stay, a delta is small."""
        moved = {
            name: torch.where(
                (torch.rand(weight.shape).to(weight.device) < share) & (weight.abs() < 1), weight / 2, weight
            )
            for name, weight in self.trainer.weights.items()
        }
        self.trainer.step(**moved)

    def holds(self) -> bool:
        """Whether every engine generates from the trainer's present weights."""
        expected = as_whole(PARTS, self.trainer.weights, "pow2")
        return all(
            content.equals(expected[name]) for engine in self.engines.engines for name, content in engine.read().items()
        )

    def fenced(self) -> bool:
        """Whether no engine generates."""
        return all(refuses(engine) for engine in self.engines.engines)

    def refused(self, match: str = "") -> None:
        """A refit fails, soon, and everything is as it must be then."""
        before, start = self.bridge.version, time.monotonic()
        with pytest.raises(RefitError, match=match):
            self.bridge.refit()
        assert time.monotonic() - start < AT_ONCE
        assert self.bridge.version == before
        assert self.fenced()


def refuses(engine: MemoryEngine) -> bool:
    try:
        engine.read()
    except (RefitError, WorkerDied):
        return True
    return False


@contextmanager
def runs() -> Iterator[Callable[..., Run]]:
    """A function that makes a run; all of them end with the block."""
    made: list[Run] = []

    def one(engines: int = 2, **how: Any) -> Run:
        torch.manual_seed(0)
        made.append(Run(engines, **how))
        return made[-1]

    yield one
    for run in made:
        for engine in run.engines.engines:
            engine.kill()
        run.trainer.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Run]]:
    with runs() as start:
        yield start


def once(when: str, number: int, act: Callable[[MemoryEngine], None]) -> Hook:
    """A hook that acts the first time."""
    done = threading.Lock()

    def hook(at: str, engine_number: int, engine: MemoryEngine) -> None:
        if (at, engine_number) == (when, number) and done.acquire(blocking=False):
            act(engine)

    return hook


def damaging(engines: set[int], times: int, change: Callable[[int, Message], list[Message]]) -> Callable[..., Any]:
    """A wrap that damages the first `times` links to the first rank of each of these engines."""
    made = dict.fromkeys(engines, 0)

    def wrap(engine: int, rank: int, end: ReceivingEnd) -> ReceivingEnd:
        if engine not in engines or rank or made[engine] >= 2 * times:  # a link from each of two trainer ranks
            return end
        made[engine] += 1
        return Tampered(end, change)

    return wrap


def flip(at: int, message: Message) -> list[Message]:
    if Header.decode(message[0]).entries:
        message[1][0] ^= 1
    return [message]


def flip_a_byte(name: str) -> Callable[[MemoryEngine], None]:
    """In the memory of the engine's second rank."""

    def act(engine: MemoryEngine) -> None:
        engine.ranks[1].held[name].data.view(torch.uint8).view(-1)[5] ^= 4

    return act


# Versions and reports


def test_versions_grow_by_one_a_refit(make):
    run = make()
    assert run.bridge.version == -1
    for version in range(3):
        run.step()
        assert run.bridge.refit().version == run.bridge.version == version
        assert run.holds()
        assert {engine.policy_version for engine in run.engines.engines} == {version}


def test_a_resumed_run_goes_on_with_its_first_version(make):
    run = make()
    bridge = RefitBridge(run.trainer, run.engines, mode="full", first_version=40)
    assert bridge.version == 39
    assert bridge.refit().version == bridge.version == 40


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_every_transport_brings_the_same_bytes(make, transport, mode):
    run = make(transport=transport, mode=mode)
    for _ in range(3):
        run.bridge.refit()
        assert run.holds()
        run.step()


def senders(run: Run, engine: int) -> list[int]:
    """The trainer's ranks that send to an engine."""
    return [i for i, rank in enumerate(run.trainer.ranks) if any(to == engine for to, _ in rank.routes)]


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_an_engine_is_sent_to_by_the_copies_on_its_machine(make, mode):
    run = make(3, copies=2, transport="nearest", mode=mode)
    run.trainer.domains = ["a", "a", "b", "b"]
    run.engines.machines = ["b", "a", "c"]
    for _ in range(3):
        run.bridge.refit()
        assert run.holds()
        run.step()
    assert [senders(run, engine) for engine in range(3)] == [[2, 3], [0, 1], [0, 1]]
    assert run.bridge.refit().between_machines == pytest.approx(1 / 3)
    near = "mapped memory within a machine" + ", direct" * (mode == "full")
    assert run.bridge.description == f"{mode} through {near}, gloo between the 3, verify digest"


def test_near_and_far_engines_hold_the_same_bytes(make, monkeypatch):
    """Over links of both kinds, also when a remote one breaks."""
    run = make(transport="nearest", mode="delta")
    run.trainer.domains, run.engines.machines, at = ["a", "a"], ["a", "b"], ["a"]

    def domain() -> str:
        return "a" if threading.current_thread().name.startswith("refit-accept") else at[0]

    def move(when: str, number: int, engine: MemoryEngine) -> None:
        at[0] = run.engines.machines[number]

    monkeypatch.setattr(shared_memory, "domain", domain)
    run.engines.hook = move
    retries = []
    for breaks in (False, False, True, False, False):
        if breaks:
            run.trainer.ranks[1].link_ends[1, 0].result().close()
        report = run.bridge.refit()
        retries.append((report.retries, report.delta))
        assert run.holds()
        assert report.between_machines == 0.5
        kinds = {
            engine: {type(rank.link_ends[engine, 0].result()) for rank in run.trainer.ranks} for engine in range(2)
        }
        assert kinds[0] == {Sender} != kinds[1]
        run.step()
    assert retries == [(0, False), (0, True), (1, True), (0, False), (0, True)]


def test_an_engine_that_starts_again_on_another_machine_is_sent_to_from_there(make):
    run = make(copies=2, transport="nearest", mode="delta")
    run.trainer.domains = ["a", "a", "b", "b"]
    run.engines.machines = ["a", "a"]
    run.bridge.refit()
    assert senders(run, 1) == [0, 1]
    run.engines.machines = ["a", "b"]
    run.engines.engines[1].kill()
    for delta in (False, False, True, True):  # the second has all bytes again, to keep them
        run.step()
        assert run.bridge.refit().delta == delta
        assert run.holds()
    assert (senders(run, 0), senders(run, 1)) == ([0, 1], [2, 3])
    kept = {sum(base.nbytes for base in rank.sender.base.values()) for rank in run.trainer.ranks[:2]}
    run.engines.machines = ["b", "b"]
    run.engines.engines[0].kill()
    for _ in range(2):
        run.step()
        run.bridge.refit()
    assert min(kept) > 0
    assert not any(rank.sender.base for rank in run.trainer.ranks[:2])  # what nobody takes is not kept


def test_copies_share_the_work_for_one_engine(make):
    run = make(1, copies=2, transport="nearest", mode="delta")
    for _ in range(3):
        run.bridge.refit()
        assert run.holds()
        run.step()
    assert run.bridge.description == "delta through mapped memory, verify digest"
    sent = [report.nbytes for report in run.trainer.reports[0]]
    assert len([nbytes for nbytes in sent if nbytes]) > 2
    assert sum(sent) == sum(part.nbytes if bool(part.format) else 2 * part.nbytes for part in PARTS)


def test_reported_bytes_are_those_that_the_links_carried(make):
    run, carried = make(mode="delta"), []

    def count(at: int, message: Message) -> list[Message]:
        carried.append(sum(entry.nbytes for entry in Header.decode(message[0]).entries))
        return [message]

    run.engines.wrap = lambda engine, rank, end: Tampered(end, count)
    full = run.bridge.refit()
    replicated = sum(part.nbytes for part in PARTS if not bool(part.format))  # each of two ranks stores these
    assert full.nbytes == NBYTES + replicated == sum(carried) / 2
    assert full.wire_over_bf16 == sum(p.nbytes for p in QUANTIZED) / sum(2 * p.data_bytes for p in QUANTIZED)
    assert (full.delta, full.retries) == (False, 0)
    links = [[end.result()._exchange.capacity for end in rank.link_ends.values()] for rank in run.trainer.ranks]
    assert full.metrics()["refit/bucket_bytes"] == full.bucket_nbytes == 2 * max(map(sum, links))  # of four links
    assert full.base_nbytes == max(
        sum(part.nbytes for part in parts if part.data_bytes >= MIN_DELTA_BYTES) for parts in run.trainer.layout
    )
    carried.clear()
    run.step()
    delta = run.bridge.refit()
    assert delta.nbytes == sum(carried) / 2 < full.nbytes / 4
    assert (delta.delta, delta.base_nbytes) == (True, full.base_nbytes)
    assert delta.wire_over_bf16 < full.wire_over_bf16 / 4


@pytest.mark.parametrize("verify", ["off", "digest", "full"])
def test_metrics_are_numbers_that_name_what_they_count(make, verify):
    run = make(verify=verify)
    run.bridge.refit()
    report = run.bridge.refit()
    metrics = report.metrics()
    assert (metrics["refit/bytes"], metrics["refit/version"], metrics["refit/delta"]) == (report.nbytes, 1, 0.0)
    stages = {"quantize", "encode", "send", "load"} | ({"compare"} if verify == "full" else set())
    assert {f"timing/refit_{stage}" for stage in stages} < set(metrics)
    assert min(metrics.values()) >= 0
    assert run.holds()


def test_no_engine_is_no_commit(make):
    run = make(engines=0)
    with pytest.raises(RefitError):
        run.bridge.refit()
    assert run.bridge.version == -1


# Fencing


def test_an_engine_refuses_from_the_first_byte_until_every_engine_can_commit(make):
    run, seen = make(), set()

    def check(when: str, number: int, engine: MemoryEngine) -> None:
        if when in ("load", "piece", "loaded", "compare"):
            assert refuses(engine)
            seen.add((when, number))
        if when == "commit":
            assert all(engine.loaded_version == run.bridge.version + 1 for engine in run.engines.engines)

    assert run.fenced()
    run.engines.hook = check
    for _ in range(2):
        run.bridge.refit()
        assert run.holds()
    assert seen == {(when, number) for when in ("load", "piece", "loaded") for number in (0, 1)}


# Engines that die


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("when", ["load", "piece", "loaded", "commit"])
@pytest.mark.parametrize("first", [True, False])
def test_an_engine_killed_in_a_refit_is_replaced_and_gets_the_whole_version(make, mode, when, first):
    run = make(mode=mode)
    if not first:
        run.bridge.refit()
        run.step()
    run.engines.hook = once(when, 1, MemoryEngine.kill)
    report = run.bridge.refit()
    assert (report.retries, run.engines.restarts) == (1, 1)
    assert run.trainer.pushes[-1] | {"digests": None, "full_only": None} == {
        "version": report.version,
        "engines": [1],
        "full_only": None,
        "delta": False,
        "keep": False,
        "digests": None,
        "with_frozen": True,
        "direct": True,
    }
    assert run.holds()
    run.step()
    assert (run.bridge.refit().retries, run.engines.restarts) == (0, 1)
    assert run.holds()


@pytest.mark.parametrize("when", ["stored", "connect"])
def test_an_engine_killed_while_it_is_linked_is_replaced(make, when):
    run = make()
    run.engines.hook = once(when, 1, MemoryEngine.kill)
    run.bridge.refit()
    assert run.engines.restarts == 1
    assert run.holds()


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_an_engine_killed_before_a_refit_is_replaced_and_what_its_links_said_is_logged(make, mode, caplog):
    run = make(mode=mode)
    run.bridge.refit()
    run.engines.engines[0].kill()
    run.step()
    report = run.bridge.refit()
    assert (report.retries, report.delta, run.engines.restarts) == (1, False, 1)
    assert run.holds()
    (said,) = (line for line in caplog.messages if "broke" in line)
    assert said.startswith("refit 1: a link to engine 0 broke: ")


def test_all_engines_killed_at_once_are_replaced(make):
    run = make()
    run.bridge.refit()
    for engine in run.engines.engines:
        engine.kill()
    assert run.bridge.refit().retries == run.engines.restarts == 2
    assert run.holds()


@pytest.mark.parametrize("when", ["stored", "load", "commit"])
def test_one_death_too_many_is_raised(make, when):
    run = make()
    run.bridge.refit()
    run.engines.max_restarts = 0
    run.engines.engines[1].kill()
    run.engines.hook = once(when, 0, MemoryEngine.kill)
    with pytest.raises(RuntimeError, match="died after 0 restarts"):
        run.bridge.refit()
    assert run.bridge.version == 0
    assert run.fenced()


def test_an_engine_that_is_given_up_before_the_trainer_has_begun_to_send_is_left_out(make):
    run, begin = make(), threading.Event()
    run.bridge.refit()
    for rank in run.trainer.ranks:
        rank.send_thread.submit(begin.wait)  # which keeps what it is asked next waiting
    run.trainer.start_push(1, [0, 1], frozenset(), delta=False, keep=False, digests=True)
    run.trainer.withdraw(1)
    loads = run.engines.engines[0].ranks
    with ThreadPoolExecutor() as threads:
        loading = [threads.submit(rank.load, 1, True, True, lambda: None) for rank in loads]
        begin.set()
        reports = run.trainer.finish_push()
        for load in loading:
            load.result()
    assert {engine for report in reports for engine, _ in report.failed} == {1}


def test_an_engine_that_dies_twice_in_a_refit_ends_it_and_the_next_works(make):
    run = make()

    def kill(when: str, number: int, engine: MemoryEngine) -> None:
        if (when, number) == ("piece", 1):
            engine.kill()

    run.engines.hook = kill
    run.refused("refit 0: engine 1 failed twice")
    run.engines.hook = lambda when, number, engine: None
    run.bridge.refit()
    assert run.engines.restarts == 2
    assert run.holds()


# Links and messages


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_link_that_breaks_is_made_anew_and_the_whole_version_sent(make, mode, transport):
    run, end = make(mode=mode, transport=transport), []
    run.bridge.refit()
    run.step()
    end.append(run.trainer.ranks[0].link_ends[1, 0].result())
    run.trainer.reading = lambda: end.pop().close() if end else None
    start = time.monotonic()
    report = run.bridge.refit()
    assert time.monotonic() - start < AT_ONCE
    assert (report.retries, run.engines.restarts, report.version) == (1, 0, 1)
    assert (run.trainer.pushes[-1]["engines"], run.trainer.pushes[-1]["delta"]) == ([1], False)
    assert run.holds()


def lost(at: int, message: Message) -> list[Message]:
    return [] if at == 0 else [message]


def repeated(at: int, message: Message) -> list[Message]:
    return [message, message] if at == 0 else [message]


def stale(at: int, message: Message) -> list[Message]:
    header = Header.decode(message[0])
    return [(replace(header, version=header.version - 1).encode(), message[1])]


def swapper() -> Callable[[int, Message], list[Message]]:
    held: list[Message] = []

    def reordered(at: int, message: Message) -> list[Message]:
        if at == 0:
            held[:] = [(message[0], message[1].clone())]
            return []
        return [message, *held] if at == 1 else [message]

    return reordered


@pytest.mark.parametrize("change", [flip, lost, repeated, stale, swapper()], ids=lambda change: change.__name__)
@pytest.mark.parametrize("damaged", [{0}, {0, 1}])
def test_a_damaged_message_is_made_good_once(make, change, damaged):
    run = make(mode="delta")
    run.engines.wrap = damaging(damaged, 1, change)
    start = time.monotonic()
    report = run.bridge.refit()
    assert time.monotonic() - start < AT_ONCE
    assert (report.retries, run.engines.restarts) == (len(damaged), 0)
    assert run.holds()
    run.step()
    assert not run.bridge.refit().retries
    assert run.holds()


@pytest.mark.parametrize("change", [flip, stale])
@pytest.mark.parametrize("damaged", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_damage_twice_is_refused_and_the_next_refit_works(make, change, damaged, mode):
    run = make(mode=mode)
    run.bridge.refit()
    run.engines.wrap = damaging(damaged, 2, change)
    for engine in (0, 1):
        run.bridge.links.disconnect(engine)
    run.step()
    run.refused(rf"refit 1: engine {min(damaged)} failed twice: refit 1: .")
    run.step()
    report = run.bridge.refit()
    assert (report.version, report.retries) == (1, 0)
    assert run.holds()


def test_a_dev_shm_that_is_full_is_refused_until_there_is_room(make, monkeypatch):
    run = make(transport="shared_memory")
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
        run.refused(r"/dev/shm.*nemo_fp8rl\.refit\.transport=collective")
    run.bridge.refit()
    assert run.holds()


# The trainer


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", [UP, NORM])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_weight_that_is_not_finite_is_named_and_no_engine_generates(make, bad, name, mode):
    run = make(mode=mode)
    run.bridge.refit()
    sound = run.trainer.weights[name].clone()
    broken = sound.clone()
    broken.view(-1)[7] = bad
    run.trainer.step(**{name: broken})
    run.refused(rf"refit 1: {re.escape(name)}\b.* not finite")
    run.trainer.step(**{name: sound})
    report = run.bridge.refit()
    assert (report.version, report.retries, report.delta) == (1, 0, False)
    assert run.holds()


def test_any_other_failure_of_the_trainer_is_raised_and_the_next_refit_works(make):
    run = make()
    run.bridge.refit()

    def fail() -> None:
        raise RuntimeError("out of memory")

    run.trainer.reading = fail
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="out of memory"):
        run.bridge.refit()
    assert time.monotonic() - start < AT_ONCE
    assert run.fenced()
    run.trainer.reading = lambda: None
    assert (run.bridge.refit().version, run.holds()) == (1, True)


def test_memory_that_is_full_in_the_trainer_is_told_with_what_to_do(make):
    run = make(mode="delta")
    run.bridge.refit()

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory")

    run.trainer.reading = only_once(full)
    run.refused(r"^refit 1: the trainer's memory is full \(CUDA .* 2\.00 GiB.*\); lower nemo_fp8rl.refit.bucket_bytes")
    assert (run.bridge.refit().version, run.holds()) == (1, True)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_that_dies_leaves_the_engines_fenced_and_another_brings_them_back(make, transport):
    run, heard = make(transport=transport), []
    run.bridge.refit()

    def die_halfway() -> None:
        if len(heard) == 0:
            heard.append("reading")
        else:
            run.trainer.kill()
            raise WorkerDied("killed")

    outcomes: dict[int, Any] = {}
    load = run.engines.load
    run.engines.load = lambda *how: outcomes.update(load(*how)) or outcomes
    run.trainer.reading = die_halfway
    start = time.monotonic()
    with pytest.raises(WorkerDied):
        run.bridge.refit()
    assert time.monotonic() - start < AT_ONCE
    assert all(isinstance(outcome, RefitError) for outcome in outcomes.values())
    assert set(outcomes) == {0, 1}
    assert run.fenced()
    another = make(transport=transport)
    run.engines.load = load
    bridge = RefitBridge(another.trainer, run.engines, mode="full", bucket_bytes=30_000, first_version=1)
    assert bridge.refit().version == 1
    assert run.holds()


def test_an_interrupt_while_engines_load_leaves_a_trainer_that_can_go_on(make):
    run = make()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    load, run.engines.load = run.engines.load, interrupt
    with pytest.raises(KeyboardInterrupt):
        run.bridge.refit()
    assert run.fenced()
    run.engines.load = load
    run.bridge.refit()
    assert run.holds()


@contextmanager
def under_way(run: Run) -> Iterator[tuple[Future, threading.Event]]:
    """A refit in a thread of its own that goes on, from where the trainer reads its weights, once the event is set."""
    reading, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reading.set()
        assert go_on.wait(20)

    run.trainer.reading = wait
    with ThreadPoolExecutor(1) as threads:
        refit = threads.submit(run.bridge.refit)
        assert reading.wait(20)
        yield refit, go_on


def test_two_refits_at_once_are_refused(make):
    run = make()
    with under_way(run) as (first, go_on):
        with pytest.raises(RefitError, match="a refit is under way"):
            run.bridge.refit()
        go_on.set()
        assert first.result(20).version == 0
    assert run.holds()
    assert run.bridge.refit().version == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, WorkerDied])
def test_what_ends_a_commit_leaves_no_engine_generating(make, error):
    run = make(3)
    run.bridge.refit()

    def fail(when: str, number: int, engine: MemoryEngine) -> None:
        if (when, number) == ("commit", 1):
            if error is WorkerDied:
                engine.kill()
            else:
                raise error

    run.engines.hook = fail
    with pytest.raises(error):
        run.bridge.refit()
    assert run.bridge.version == 0
    assert run.fenced()
    run.engines.hook = lambda when, number, engine: None
    run.bridge.refit()
    assert run.holds()


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "collective"])
def test_an_engine_that_hangs_takes_no_other_with_it(make, transport):
    limit, go_on = 4.0, threading.Event()
    run = make(3, transport=transport, timeout=SENDER_SHARE * limit)
    run.engines.timeout, run.engines.limit = RECEIVER_SHARE * limit, limit
    run.bridge.refit()
    run.step()
    run.engines.hook = once("piece", 1, lambda engine: go_on.wait(20))
    try:
        report = run.bridge.refit()
    finally:
        go_on.set()
    assert report.retries >= 1
    assert run.engines.restarts == 1
    assert run.holds()


def test_a_link_whose_source_end_fails_is_made_anew_at_once(make):
    run = make(transport="shared_memory")
    run.bridge.refit()
    rank = run.trainer.ranks[0]
    key = next(iter(rank.link_ends))
    rank.link_ends[key].result().close()
    rank.link_ends[key] = Future()
    rank.link_ends[key].set_exception(LinkError("no memory for it"))
    run.step()
    start = time.monotonic()
    assert run.bridge.refit().retries == 1
    assert time.monotonic() - start < AT_ONCE
    assert run.holds()


def test_a_link_that_ended_needs_no_collector_to_be_let_go_of(make):
    run = make()
    gc.disable()
    try:
        run.bridge.refit()
        ends = [weakref.ref(end.result()) for rank in run.trainer.ranks for end in rank.link_ends.values()]
        assert len(ends) > 1
        for engine in range(2):
            run.bridge.links.disconnect(engine)
        assert [end for end in ends if end() is not None] == []
    finally:
        gc.enable()


# An engine that was started again


def test_it_is_left_to_a_refit_under_way_or_waits_for_its_end(make):
    run, earlier_life = make(), -1
    run.bridge.refit()
    with under_way(run) as (refit, go_on), ThreadPoolExecutor(1) as threads:
        assert run.bridge.recover(1, WorkerDied("killed"), earlier_life, False) is False
        waiting = threads.submit(run.bridge.recover, 1, WorkerDied("killed"), earlier_life, True)
        assert run.engines.replacements == []
        go_on.set()
        assert refit.result(20).version == 1
        assert waiting.result(20) is True
    assert (run.engines.replacements, run.engines.restarts) == ([(1, earlier_life)], 0)
    assert run.holds()


def test_an_engine_started_again_is_caught_up_with_the_committed_version(make):
    run = make(mode="delta")
    for _ in range(2):
        run.bridge.refit()
    run.engines.kill_and_restart(1)
    assert run.engines.engines[1].policy_version == run.bridge.version == 1
    assert run.holds()
    run.step()
    assert run.bridge.refit().delta is False
    run.step()
    assert run.bridge.refit().delta is True
    assert run.holds()


def test_to_catch_up_no_engine_that_generates_is_asked_where_it_is(make):
    run = make(3)
    run.bridge.refit()
    assert run.engines.located == [[0, 1, 2], [1], [2]]
    run.engines.kill_and_restart(1)
    assert run.engines.located[3:] == [[1]]


def test_a_lone_engine_is_not_caught_up_with_weights_that_moved(make):
    run = make(1)
    run.bridge.refit()
    run.step()
    run.engines.kill_and_restart(0)
    assert run.fenced()
    run.bridge.refit()
    assert run.holds()


def only_once(does: Callable[[], None]) -> Callable[[], None]:
    left = [does]
    return lambda: left.pop()() if left else None


@pytest.mark.parametrize("what", ["refit", "revival"])
def test_a_step_of_another_thread_waits_until_the_weights_are_sent(make, what):
    run = make(mode="delta")
    for _ in range(2):
        run.bridge.refit()
    sent = as_whole(PARTS, run.trainer.weights, "pow2")
    stepping = threading.Thread(target=run.step)
    run.trainer.reading = only_once(stepping.start)
    if what == "refit":
        run.bridge.refit()
    else:
        run.engines.kill_and_restart(1)
    stepping.join()
    assert all(content.equals(sent[name]) for engine in run.engines.engines for name, content in engine.read().items())
    assert not run.holds()
    run.bridge.refit()
    assert run.holds()


def test_experts_of_which_each_rank_stores_its_own_are_sent_as_deltas():
    experts = [fp8(f"experts.{number}.up_proj.weight", 256, 384) for number in range(2)]
    parts = [*experts, bf16(NORM, 100)]
    trainer = MemoryTrainer(random_weights(parts), [parts])
    engines = MemoryEngines([[experts[0], parts[2]], [experts[1], parts[2]]])
    bridge = RefitBridge(trainer, engines, mode="delta")
    assert [bridge.refit().delta for _ in range(2)] == [False, True]
    assert trainer.pushes[-1]["full_only"] == set()
    trainer.close()


def test_a_commit_that_an_engine_did_not_hear_is_said_again(make):
    run = make()
    run.bridge.refit()
    run.step()

    def unheard(engine: MemoryEngine) -> None:
        raise WorkerDied("the call did not arrive")

    run.engines.hook = once("commit", 1, unheard)
    assert run.bridge.refit().version == 1
    assert run.holds()


def test_what_others_had_asked_is_no_cost_of_the_refit(make, monkeypatch):
    run = make(mode="auto")
    fence = run.engines.fence

    def slow(engines):
        time.sleep(0.3)
        return fence(engines)

    run.bridge.refit()
    monkeypatch.setattr(run.engines, "fence", slow)
    run.step()
    assert run.bridge.refit().seconds > 0.3
    assert all(seconds < 0.3 for seconds in run.bridge.choice.seconds.values())


def test_the_trainer_makes_room_before_an_engine_is_started_beside_it(make):
    run = make()
    run.bridge.refit()
    run.engines.kill_and_restart(1)
    assert run.trainer.rooms_made == 1
    run.engines.engines[0].kill()
    assert run.bridge.refit().retries == 1
    assert run.trainer.rooms_made == 2


def test_before_the_first_version_and_after_a_failed_one_there_is_nothing_to_catch_up_with(make):
    run = make()
    run.engines.kill_and_restart(1)
    assert run.fenced()
    run.bridge.refit()
    run.engines.wrap = damaging({0}, 2, flip)
    run.bridge.links.disconnect(0)
    run.refused("failed twice")
    run.engines.kill_and_restart(1)
    assert run.fenced()


# Whole versions and deltas


def deltas(run: Run, refits: int) -> list[bool]:
    made = []
    for _ in range(refits):
        run.step()
        made.append(run.bridge.refit().delta)
        assert run.holds()
    return made


def test_full_never_sends_a_delta_and_keeps_nothing(make):
    run = make(mode="full")
    assert deltas(run, 3) == [False] * 3
    assert not any(push["keep"] for push in run.trainer.pushes)
    assert run.bridge.refit().base_nbytes == 0


def test_delta_sends_one_after_the_first(make):
    assert deltas(make(mode="delta"), 4) == [False, True, True, True]


@pytest.mark.parametrize("faster", ["delta", "full"])
def test_auto_tries_both_and_takes_the_faster(make, faster):
    run = make(mode="auto")
    assert deltas(run, 4) == [False, False, True, True]
    run.bridge.choice.seconds = {"delta": 1e9, "full": 1e9, faster: 0.0}
    assert deltas(run, 1) == [faster == "delta"]
    assert run.trainer.pushes[-1]["keep"] == (faster == "delta")


def test_a_refit_that_makes_links_says_nothing_of_speed(make):
    run = make(mode="auto")
    run.bridge.refit()
    assert run.bridge.choice.seconds == {}
    for _ in range(3):
        run.bridge.refit()
    known = dict(run.bridge.choice.seconds)
    assert known.keys() == {"full", "delta"}
    run.engines.kill_and_restart(1)
    run.bridge.links.disconnect(1)
    assert run.bridge.refit().retries == 0
    assert run.bridge.choice.seconds == known


@pytest.mark.parametrize("faster", ["delta", "full"])
def test_the_slower_one_is_tried_again_later(faster):
    choice, made, kept = ModeChoice("auto"), [], []
    base = False
    for _ in range(RETRY_AFTER + 5):
        delta, keep = choice.wants_delta and base, choice.wants_base
        made.append("delta" if delta else "full")
        kept.append(keep)
        base = keep
        choice.record(delta, 1.0 if made[-1] == faster else 2.0)
    assert made[:3] == ["full", "delta", "delta"]
    slower = {"delta": [0, RETRY_AFTER + 1], "full": [1, 2, RETRY_AFTER + 3]}[faster]
    assert [i for i, kind in enumerate(made) if kind != faster] == slower
    not_kept = [i for i, keep in enumerate(kept) if not keep]
    assert not_kept == ([] if faster == "delta" else [*range(3, RETRY_AFTER + 2), RETRY_AFTER + 4])


def test_a_delta_that_became_slower_than_all_bytes_is_given_up():
    choice = ModeChoice("auto")
    choice.record(False, 2.0)
    choice.record(True, 9.0)  # the first one compiles
    choice.record(True, 1.0)
    assert choice.wants_delta
    choice.record(True, 3.0)
    assert not choice.wants_delta


def test_a_refit_with_a_retry_says_nothing_of_speed(make):
    run = make(mode="auto")
    run.engines.wrap = damaging({0}, 1, flip)
    run.bridge.refit()
    assert run.bridge.choice.seconds == {}


def test_an_engine_that_lost_its_memory_gets_all_bytes(make):
    """As after a sleep that gave the weights back."""
    run = make(mode="delta")
    assert deltas(run, 2) == [False, True]
    run.engines.engines[1].loaded_version = -1
    assert deltas(run, 2) == [False, True]


def test_a_trainer_that_lost_its_base_sends_all_bytes(make):
    run = make(mode="delta")
    assert deltas(run, 2) == [False, True]
    run.trainer.ranks[1].sender.base_version = -1
    assert deltas(run, 2) == [False, True]


def test_a_tensor_that_an_engine_repacks_goes_whole_beside_deltas(make):
    run, whole = make(mode="delta", repacked=UP), PARTS[0]
    assert deltas(run, 2) == [False, True]
    assert run.trainer.pushes[-1]["full_only"] == {UP}
    run.step()
    assert whole.nbytes < run.bridge.refit().nbytes < whole.nbytes * 1.2


# Verification


def test_verify_full_finds_a_byte_that_changed_in_an_engine(make):
    """And sends that engine the whole version again."""
    run = make(verify="full")
    run.bridge.refit()
    run.engines.hook = once("compare", 1, flip_a_byte(DOWN))
    run.step()
    assert run.bridge.refit().retries == 1
    assert run.engines.loads[-2:] == [(1, 1, False), (1, 1, True)]
    assert run.holds()


def test_verify_full_compares_what_was_sent_again_and_no_longer_believes_it_the_third_time(make):
    run, spoilt = make(verify="full"), []

    def spoil(when: str, number: int, engine: MemoryEngine) -> None:
        if (when, number) == ("compare", 1):
            spoilt.append(flip_a_byte(DOWN)(engine))

    run.engines.hook = spoil
    run.refused(r"engines \[1\] do not hold what was sent to them, twice")
    assert len(spoilt) == 2


@pytest.mark.parametrize("when", ["commit", "later"])
def test_verify_full_compares_an_engine_that_was_started_again(make, when):
    run = make(verify="full")
    run.bridge.refit()
    if when == "commit":
        run.engines.hook = once("commit", 1, MemoryEngine.kill)
        run.bridge.refit()
    else:
        run.engines.kill_and_restart(1)
    assert run.engines.loads[-2:] == [(1, run.bridge.version, False), (1, run.bridge.version, True)]
    assert run.holds()


def test_verify_full_refuses_an_engine_that_cannot_hold_the_bytes(make):
    run, compared = make(verify="full"), []

    def spoil(when: str, number: int, engine: MemoryEngine) -> None:
        compared.extend([when] * (when == "compare"))
        if number == 1 and when in ("compare", "piece") and compared:
            engine.ranks[1].held[DOWN].data.view(torch.uint8).view(-1)[5] = 77

    run.engines.hook = spoil
    # by buckets: in place, the trainer may take the digest of what the other rank's thread has spoiled
    run.engines.wrap = lambda engine, rank, end: Tampered(end, lambda at, message: [message])
    run.refused(rf"engine 1 failed twice: .*{re.escape(DOWN)} in the engine is not what the trainer sent")
    run.engines.hook = lambda when, number, engine: None
    assert run.bridge.refit().retries == 0
    assert run.holds()


@pytest.mark.parametrize("name", [UP, DOWN])
def test_verify_digest_finds_a_changed_byte_where_a_delta_meets_it(make, name):
    run = make(mode="delta", verify="digest")
    run.bridge.refit()
    run.engines.hook = once("load", 1, flip_a_byte(name))
    run.step()
    report = run.bridge.refit()
    assert (report.retries, report.version) == (1, 1)
    assert run.holds()


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_digests_of_weights_on_a_gpu_are_checked_as_such(make, monkeypatch, mode):
    monkeypatch.setattr(message, "digest_of", word_sum_digest)
    run, seen = make(mode=mode), set()

    def look(at: int, message: Message) -> list[Message]:
        seen.update(entry.digest[: len(WORD_SUM_PREFIX)] for entry in Header.decode(message[0]).entries)
        return [message]

    run.engines.wrap = lambda engine, rank, end: Tampered(end, look)
    assert run.bridge.refit().retries == 0
    if mode == "delta":
        run.engines.hook = once("load", 1, flip_a_byte(UP))
    run.step()
    assert run.bridge.refit().retries == (mode == "delta")
    assert run.holds()
    assert seen == {WORD_SUM_PREFIX}


def test_without_verification_no_digest_is_taken(make):
    run, seen = make(verify="off"), set()

    def look(at: int, message: Message) -> list[Message]:
        seen.update(entry.digest for entry in Header.decode(message[0]).entries)
        return [message]

    run.engines.wrap = lambda engine, rank, end: Tampered(end, look)
    run.bridge.refit()
    assert seen == {""}
    assert run.holds()


def test_the_weights_are_not_touched(make):
    run = make(mode="delta")
    before: dict[str, Tensor] = {name: weight.clone() for name, weight in run.trainer.weights.items()}
    run.bridge.refit()
    run.bridge.refit()
    assert all(torch.equal(weight, before[name]) for name, weight in run.trainer.weights.items())


@pytest.fixture
def with_base(make) -> Run:
    """A run whose matrices never change, as under adapters; its vectors do."""
    run = make()
    run.trainer.layout = [
        [replace(part, is_frozen=len(part.shape) == 2) for part in parts] for parts in run.trainer.layout
    ]
    return run


def move_vectors(run: Run) -> None:
    moved = {part.name: run.trainer.weights[part.name] + 1 for part in PARTS if len(part.shape) != 2}
    assert moved
    run.trainer.step(**moved)


def test_what_never_changes_travels_once(with_base):
    first = with_base.bridge.refit()
    move_vectors(with_base)
    second = with_base.bridge.refit()
    vectors = sum(part.nbytes for part in PARTS if len(part.shape) != 2)
    assert second.nbytes == vectors * 2 < first.nbytes  # on both ranks of an engine
    assert with_base.holds()


def test_what_never_changes_is_compared_once_with_verify_full(with_base):
    with_base.bridge.verify = "full"
    with_base.bridge.refit()
    move_vectors(with_base)
    with_base.bridge.refit()
    assert with_base.holds()
    assert [push["with_frozen"] for push in with_base.trainer.pushes] == [True, True, False, False]


@pytest.mark.parametrize("when", ["load", "loaded", "commit"])
def test_an_engine_that_starts_again_gets_what_never_changes_again(with_base, when):
    with_base.bridge.refit()
    move_vectors(with_base)
    with_base.engines.hook = once(when, 1, MemoryEngine.kill)
    with_base.bridge.refit()
    assert with_base.holds()
    move_vectors(with_base)
    with_base.bridge.refit()
    assert with_base.holds()
    assert with_base.trainer.pushes[-1]["with_frozen"] is False


def test_an_engine_that_lost_its_memory_gets_what_never_changes_again(with_base):
    with_base.bridge.refit()
    engine = with_base.engines.engines[0]
    engine.loaded_version = -1
    for rank in engine.ranks:
        rank.held = {name: empty(part) for name, part in rank.parts.items()}
    with_base.bridge.refit()
    assert with_base.holds()


def test_a_refused_version_brings_all_the_next_time(with_base):
    with_base.bridge.refit()
    vector = next(part.name for part in PARTS if len(part.shape) == 1 and part.size[0])
    good = with_base.trainer.weights[vector]
    with_base.trainer.step(**{vector: torch.full_like(good, torch.nan)})
    with_base.refused("not finite")
    with_base.trainer.step(**{vector: good})
    with_base.bridge.refit()
    assert with_base.trainer.pushes[-1]["with_frozen"] is True
    assert with_base.holds()
