"""An engine passes on, to the bit, what the trainer sent it, whatever its format and its place in memory."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from nemo_fp8rl.fp8 import FORMATS
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.route_plan import align_up
from tests.refit.memory_engine import (
    HOST,
    TOKEN,
    MemoryEngines,
    MemoryRank,
    MemoryTrainer,
    as_whole,
    random_weights,
    split,
)
from tests.refit.stream import PARTS, Stream, halve_some
from tests.refit.test_expert_stacks import by_experts, by_rows, stack_values
from tests.refit.test_formats import parts


class Relay:
    """The ranks of a stream's engine, and a second engine of the same layout that gets everything from them."""

    def __init__(self, stream: Stream) -> None:
        self.givers = stream.engine.ranks
        self.takers = [MemoryRank(list(rank.parts.values()), frozenset()) for rank in self.givers]
        for giver, taker in zip(self.givers, self.takers, strict=True):
            route = tuple(part for link in giver.links for part in link.route)
            capacity = max(align_up(part.nbytes) for part in route)
            (end,) = giver.for_peers.offer(1, [route], [capacity], "in_process", HOST, TOKEN, 20.0)
            taker.links = [IncomingLink(end, route)]

    def give(self, version: int, *, delta: bool = False, with_frozen: bool = True) -> list[SendReport]:
        how = {"delta": delta, "direct": not delta, "with_frozen": with_frozen}
        for giver in self.givers:
            giver.for_peers.start_push(giver.contents(), version, [1], **how)
        with ThreadPoolExecutor() as threads:
            loads = [threads.submit(rank.load, version, True, with_frozen, lambda: None) for rank in self.takers]
        for load in loads:
            load.result()
        return [giver.for_peers.finish_push() for giver in self.givers]

    def is_equal(self) -> bool:
        return all(
            content.equals(taker.held[name])
            for giver, taker in zip(self.givers, self.takers, strict=True)
            for name, content in giver.held.items()
        )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("delta", [False, True])
def test_every_format_is_passed_on_to_the_bit(name, delta):
    weights = random_weights(parts(name))
    stream = Stream(split(parts(name), 2, 0, replicate=False), split(parts(name), 2, 1, replicate=True), bucket=1 << 16)
    relay = Relay(stream)
    for version in range(3):
        is_delta = delta and version > 0
        reports = stream.deliver(weights, version, delta=is_delta, keep=True)
        passed = relay.give(version, delta=is_delta)
        assert relay.is_equal()
        assert sum(report.nbytes for report in passed) == sum(report.nbytes for report in reports)
        weights = halve_some(weights, 0.01, seed=version)


@pytest.mark.parametrize("layout", [by_experts, by_rows])
@pytest.mark.parametrize("format", ["fp8", "nvfp4", "bfloat16"])
def test_stacks_of_experts_are_passed_on_to_the_bit(layout, format):
    stream, weights = Stream(by_experts(format, 2), layout(format, 2), bucket=60_000), stack_values()
    relay = Relay(stream)
    for version in range(2):
        stream.deliver(weights, version)
        relay.give(version)
        assert relay.is_equal()
        weights = stack_values(seed=1)


def test_a_whole_version_is_passed_on_where_no_delta_is_wanted():
    """As to an engine that joins after a refit of deltas."""
    stream, weights = Stream([PARTS], [PARTS]), random_weights(PARTS)
    relay = Relay(stream)
    stream.deliver(weights, 0, keep=True)
    (whole,) = relay.give(0)
    stream.deliver(halve_some(weights, 0.01), 1, delta=True, keep=True)
    (again,) = relay.give(1, delta=False)
    assert again.nbytes == whole.nbytes
    assert relay.is_equal()


def test_pieces_that_did_not_come_as_they_are_wanted_are_not_passed_on():
    stream, weights = Stream([PARTS], [PARTS]), random_weights(PARTS)
    relay = Relay(stream)
    stream.deliver(weights, 0)
    (giver,) = relay.givers
    giver.for_peers.digests.popitem()
    with pytest.raises(RefitError, match="in other pieces than it is to pass on"):
        relay.give(0)


def test_a_load_ends_a_push_that_nobody_takes():
    stream, weights = Stream([PARTS], [PARTS], bucket=20_000), random_weights(PARTS)
    relay = Relay(stream)
    stream.deliver(weights, 0)
    (giver,) = relay.givers
    giver.for_peers.start_push(giver.contents(), 0, [1], delta=False)
    stream.deliver(random_weights(PARTS, seed=1), 1)
    with pytest.raises(RefitError, match="stopped"):
        giver.for_peers.finish_push()


@pytest.mark.parametrize(("ranks", "dims"), [(1, (0, 0)), (2, (0, 1)), (2, (1, 0)), (3, (0, 1))])
def test_over_random_steps_and_faults_all_engines_have_the_bytes_of_their_version(ranks, dims):
    """Engines on faked machines, some of them with the trainer: leaders, followers, joiners, deaths."""
    torch.manual_seed(0)
    rng, weights = random.Random(f"{ranks} {dims}"), random_weights(PARTS)
    trainer = MemoryTrainer(weights, split(PARTS, 2, dims[0], replicate=False))
    engines = MemoryEngines(split(PARTS, ranks, dims[1], replicate=True), 5, max_restarts=1000)
    trainer.domains, engines.machines = ["t", "t"], list("aaabt")
    bridge = RefitBridge(trainer, engines, mode="auto", bucket_bytes=60_000)
    caught_up = passed = 0
    for step in range(25):
        trainer.step(**halve_some(trainer.weights, rng.choice([0.0, 0.01, 0.3]), seed=step))
        for engine in range(5):
            if rng.random() < 0.1:
                engines.engines[engine].kill()
        bridge.choice.seconds = {}  # both modes, in turns
        report = bridge.refit()
        expected = as_whole(PARTS, trainer.weights, "pow2")
        passed += len(engines.gifts)
        engines.gifts.clear()
        assert report.version == step
        for _ in range(2):
            for engine in engines.engines:
                assert all(content.equals(expected[name]) for name, content in engine.read().items())
            trainer.step(**halve_some(trainer.weights, 0.01, seed=100 + step))
            if rng.random() < 0.5:
                engines.machines[rng.randrange(5)] = rng.choice("abt")
                engines.kill_and_restart(rng.randrange(5))
                caught_up += len(engines.gifts)
                engines.gifts.clear()
    trainer.close()
    assert caught_up > 5
    assert passed > 3
