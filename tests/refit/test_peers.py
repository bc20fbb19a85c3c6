"""Engines get a version from other engines: one that joins, and those that share a machine without the trainer."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.workers import WorkerDied
from tests.refit.memory_engine import MemoryEngine, Tampered
from tests.refit.test_bridge import DOWN, UP, Run, flip, flip_a_byte, once, refuses, runs, senders


@pytest.fixture
def make() -> Iterator[Callable[..., Run]]:
    with runs() as start:
        yield start


def bits(engine: MemoryEngine) -> dict[str, bytes]:
    """The bytes from which the engine would generate."""
    return {
        name: b"".join(bytes_of(t).numpy().tobytes() for t in content.tensors)
        for name, content in engine.read().items()
    }


def same(run: Run) -> bool:
    """True if all engines generate from the same bytes of the committed version."""
    first, *others = run.engines.engines
    versions = {engine.policy_version for engine in run.engines.engines}
    return versions == {run.bridge.version} and all(bits(engine) == bits(first) for engine in others)


# An engine that was started again, or joins


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "collective"])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_after_a_step_an_engine_is_caught_up_by_its_peer(make, caplog, transport, mode):
    run = make(mode=mode, transport=transport)
    for _ in range(3):
        run.bridge.refit()
        before = run.trainer.pushes[:]
        run.step()
    run.engines.kill_and_restart(1)
    assert same(run)
    assert (run.trainer.pushes, run.engines.gifts) == (before, [(0, 2, [1], False)])
    assert caplog.messages == ["engine 1 got version 2 from engine 0"]
    report = run.bridge.refit()
    assert (report.delta, report.retries) == (mode == "delta", 0)  # nothing that a delta needs was lost
    assert run.holds()


def test_a_peer_links_nothing_longer_than_it_gives(make):
    run = make()
    run.bridge.refit()
    run.step()
    run.engines.kill_and_restart(1)
    assert all(rank.for_peers.rank is None for engine in run.engines.engines for rank in engine.ranks)


def test_a_peer_generates_while_it_gives(make):
    run, seen = make(), []
    run.bridge.refit()
    run.step()
    run.engines.hook = lambda when, number, engine: (
        when == "piece" and seen.append(run.engines.engines[0].policy_version)
    )
    run.engines.kill_and_restart(1)
    assert set(seen) == {0}


def test_no_step_has_to_end_before_a_peer_gives(make):
    """As of a trainer that has begun a step and holds its weights until the end of it."""
    run = make()
    run.bridge.refit()
    run.step()
    ended, held = threading.Event(), threading.Event()

    def step() -> None:
        with run.trainer.hold_weights():
            held.set()
            ended.wait(20)

    stepping = threading.Thread(target=step)
    stepping.start()
    held.wait(20)
    run.engines.kill_and_restart(1)
    assert same(run) and not ended.is_set()
    ended.set()
    stepping.join()


def test_a_peer_whose_memory_is_damaged_gives_nothing_and_another_one_does(make, caplog):
    """The trainer's digests travel with the bytes."""
    run = make(3)
    run.bridge.refit()
    run.step()
    flip_a_byte(DOWN)(run.engines.engines[0])
    run.engines.kill_and_restart(2)
    assert bits(run.engines.engines[2]) == bits(run.engines.engines[1])
    *_, refused, given = caplog.messages
    assert refused.startswith(f"engine 2 could not get (refit 0: {DOWN} in the engine is not what the trainer sent)")
    assert given == "engine 2 got version 0 from engine 1"


@pytest.mark.parametrize("when", ["offer", "give", "given"])
def test_where_a_peer_dies_another_one_gives(make, when):
    run = make(3)
    run.bridge.refit()
    run.step()
    run.engines.hook = once(when, 0, MemoryEngine.kill)
    run.engines.kill_and_restart(2)
    assert bits(run.engines.engines[2]) == bits(run.engines.engines[1])
    assert run.bridge.refit().retries == 1
    assert run.holds()


def test_a_peer_that_dies_while_it_sends_is_no_loss(make):
    run = make(3)
    run.bridge.refit()
    run.step()
    run.engines.hook = once("piece", 2, lambda _: run.engines.engines[0].kill())
    run.engines.kill_and_restart(2)
    assert bits(run.engines.engines[2]) == bits(run.engines.engines[1])
    run.bridge.refit()
    assert run.holds()


def test_without_a_peer_that_lives_the_engine_waits_for_the_next_refit(make):
    run = make()
    run.bridge.refit()
    run.step()
    run.engines.engines[0].kill()
    run.engines.kill_and_restart(1)
    assert run.fenced()
    run.bridge.refit()
    assert run.holds()


@pytest.mark.parametrize("when", ["load", "loaded", "commit"])
def test_an_engine_that_dies_as_it_takes_the_version_is_started_once_more(make, when):
    run = make()
    run.bridge.refit()
    run.step()
    run.engines.hook = once(when, 1, MemoryEngine.kill)
    run.engines.kill_and_restart(1)
    assert same(run) and run.engines.restarts == 2


def test_an_engine_that_dies_twice_as_it_takes_the_version_is_an_error(make):
    run = make()
    run.bridge.refit()
    run.step()
    run.engines.hook = lambda when, number, engine: (when, number) == ("load", 1) and engine.kill()
    with pytest.raises(WorkerDied):
        run.engines.kill_and_restart(1)
    assert not refuses(run.engines.engines[0])


def test_a_peer_that_keeps_a_tensor_in_another_form_gives_nothing(make, caplog):
    run = make(repacked=UP)
    run.bridge.refit()
    run.step()
    run.engines.kill_and_restart(1)
    assert refuses(run.engines.engines[1])
    (said,) = caplog.messages
    assert said == (f"engine 1 could not get (it keeps {UP} in a form of its own) version 0 from engine 0")
    run.bridge.refit()
    assert run.holds()


def test_after_a_failed_refit_no_peer_gives(make):
    run = make()
    run.bridge.refit()
    run.engines.wrap = lambda engine, rank, end: Tampered(end, flip) if engine == 0 else end
    run.bridge.links.disconnect(0)
    run.step()
    run.refused("failed twice")
    run.engines.kill_and_restart(1)
    assert run.fenced()


@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_peer_gives_as_the_trainer_would(make, verify):
    """Nothing is verified where the trainer sends no digests; all is compared where it is compared."""
    run = make(verify=verify)
    run.bridge.refit()
    run.step()
    del run.engines.loads[:]
    run.engines.kill_and_restart(1)
    assert same(run)
    assert run.engines.loads == [(1, 0, False), (1, 0, True)][: 1 + (verify == "full")]


def test_what_was_caught_up_can_give_in_its_turn(make):
    run = make()
    run.bridge.refit()
    run.step()
    for engine in (1, 0, 1):
        run.engines.kill_and_restart(engine)
        assert same(run)


# Engines that share a machine without the trainer, which are faked: only the names of their domains differ


def faked(make: Callable[..., Run], machines: str, **how: Any) -> Run:
    """A trainer on the machine t and an engine on each of these, after the first refit."""
    run = make(len(machines), **how)
    run.trainer.domains, run.engines.machines = ["t"] * len(run.trainer.ranks), list(machines)
    run.bridge.refit()
    assert run.engines.gifts == []  # what an engine can pass on is known from now on
    return run


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_every_byte_travels_once_to_a_machine(make, mode, transport):
    run, between = faked(make, "aaaa", mode=mode, transport=transport), []
    to_each = sum(report.nbytes for report in run.trainer.reports[-1])
    for _ in range(3):
        run.step()
        report = run.bridge.refit()
        assert run.holds() and same(run)
        assert (report.retries, report.delta, report.between_machines) == (0, mode == "delta", 1 / 4)
        assert run.trainer.pushes[-1]["engines"] == [0]
        between.append(sum(report.nbytes for report in run.trainer.reports[-1]))
        assert report.nbytes == between[-1]  # to each engine, wherever from
        assert report.direct == (mode == "full")
    assert run.engines.gifts[-1] == (0, 3, [1, 2, 3], mode == "delta")
    if mode == "full":
        assert between == [to_each / 4] * 3
    else:
        assert max(between) < to_each / 4 / 4


def test_leaders_are_of_machines_without_the_trainer_alone(make):
    run = faked(make, "atabtb")
    run.step()
    report = run.bridge.refit()
    assert run.bridge.links.peers.leaders == {2: 0, 5: 3}
    assert sorted(run.engines.gifts) == [(0, 1, [2], False), (3, 1, [5], False)]
    assert (run.trainer.pushes[-1]["engines"], report.between_machines) == ([0, 1, 3, 4], 2 / 6)
    assert run.holds()


def test_leaders_of_several_machines_share_the_copies_of_the_trainer(make):
    run = faked(make, "aabbcc", copies=2)
    run.step()
    run.bridge.refit()
    assert run.holds()
    assert [senders(run, engine) for engine in (0, 2, 4)] == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("when", ["load", "piece", "loaded", "give", "given", "commit"])
def test_a_leader_that_dies_is_replaced_and_its_followers_get_the_version(make, when, mode):
    run = faked(make, "aaa", mode=mode)
    run.step()
    run.bridge.refit()
    run.step()
    run.engines.hook = once(when, 0, MemoryEngine.kill)
    report = run.bridge.refit()
    assert report.retries >= 1 and run.engines.restarts == 1
    assert run.holds() and same(run)
    for _ in range(2):
        run.step()
        assert run.bridge.refit().retries == 0
        assert run.holds()
    assert len(run.bridge.links.peers.leaders) == 2


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("when", ["load", "piece", "loaded", "commit"])
def test_a_follower_that_dies_is_replaced_and_gets_the_version(make, when, mode):
    run = faked(make, "aaa", mode=mode)
    run.step()
    run.bridge.refit()
    run.step()
    run.engines.hook = once(when, 1, MemoryEngine.kill)
    report = run.bridge.refit()
    assert (report.retries, run.engines.restarts) == (1, 1)
    assert run.holds() and same(run)
    run.step()
    assert run.bridge.refit().retries == 0
    assert run.engines.gifts[-1][2] == [1, 2]
    assert run.holds()


def test_a_leader_that_dies_while_it_sends_takes_no_follower_with_it(make):
    run = faked(make, "aaa")
    run.step()
    run.engines.hook = once("piece", 1, lambda _: run.engines.engines[0].kill())
    report = run.bridge.refit()
    assert (report.retries, run.engines.restarts) == (3, 1)
    assert run.holds() and same(run)


def test_what_is_damaged_between_neighbours_comes_from_the_trainer(make):
    run = faked(make, "aa")
    run.engines.wrap = lambda engine, rank, end: Tampered(end, flip) if made(engine) else end
    links = {1: 0}

    def made(engine: int) -> bool:
        if engine == 1:
            links[1] += 1
        return engine == 1 and links[1] <= 2  # the links from the leader's two ranks

    run.step()
    assert run.bridge.refit().retries == 1
    assert run.holds()
    run.step()
    assert run.bridge.refit().retries == 0
    assert run.holds()


def test_a_follower_that_fails_twice_is_an_error(make):
    run = faked(make, "aa")
    run.engines.wrap = lambda engine, rank, end: Tampered(end, flip) if engine == 1 else end
    run.step()
    run.refused("engine 1 failed twice")


def test_a_leader_that_fails_in_both_parts_of_a_refit_is_an_error(make):
    run = faked(make, "aa")
    run.step()
    run.bridge.refit()
    run.step()
    run.trainer.ranks[0].link_ends[0, 0].result().close()
    run.engines.hook = once("given", 0, MemoryEngine.kill)
    run.refused("engine 0 failed twice")


def test_engines_that_cannot_pass_all_on_get_it_from_the_trainer(make):
    run = make(2, repacked=UP)
    run.trainer.domains, run.engines.machines = ["t", "t"], ["a", "a"]
    for _ in range(3):
        report = run.bridge.refit()
        assert (report.retries, report.between_machines) == (0, 1.0)
        assert run.holds()
        run.step()
    assert run.engines.gifts == []


def test_followers_are_compared_byte_by_byte_too(make):
    run = faked(make, "aaa", verify="full")
    run.step()
    del run.engines.loads[:], run.engines.gifts[:]
    run.engines.hook = once("compare", 2, flip_a_byte(DOWN))
    assert run.bridge.refit().retries == 1
    assert run.engines.gifts == [(0, 1, [1, 2], False)] * 2
    assert run.holds()


def test_a_joiner_of_a_machine_is_caught_up_by_its_neighbour(make, caplog):
    run = faked(make, "aab")
    run.step()
    run.bridge.refit()
    run.step()
    run.engines.machines = list("abb")
    run.engines.kill_and_restart(1)
    assert caplog.messages == ["engine 1 got version 1 from engine 2"]
    run.bridge.refit()
    assert len(run.bridge.links.peers.leaders) == 1
    assert run.holds()
