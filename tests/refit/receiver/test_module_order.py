"""Trainer ranks that share modules: one that is ahead waits for the others, and none waits for ever."""

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.refit.manifest import RefitError, Sources, TensorPart
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink, receive_pieces
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.sender.weight_sender import Link, WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.memory_engine import Layout, at_rest, bf16, split

LAYERS = [f"model.layers.{i}" for i in range(12)]
PARTS = [bf16(f"{layer}.{x}.weight", 8, 64) for layer in LAYERS for x in ("gate", "up", "down")]
MODULES = {f"{layer}.{x}.weight": (layer, x == "down") for layer in LAYERS for x in ("gate", "up", "down")}
HALF = 4 * 64 * 2
"""Bytes of half a tensor."""


class Linked:
    """Senders and, of each engine, what it reads. buckets: bytes of those of one link after the other."""

    def __init__(self, sources: Layout, engines: int, buckets: Iterator[int], timeout: float = 20.0) -> None:
        self.sources = sources
        self.senders = [WeightSender(parts, "pow2") for parts in sources]
        self.links: list[dict[tuple[int, int], Link]] = [{} for _ in sources]
        self.incoming: list[list[IncomingLink]] = [[] for _ in range(engines)]
        self.taken = 0
        for engine in range(engines):
            for i, (route,) in enumerate(Sources(sources).routes([PARTS], HALF)):
                sending, receiving = in_process_link(next(buckets), timeout)
                self.links[i][engine, 0] = Link(sending, route)
                self.incoming[engine].append(IncomingLink(receiving, route))

    def send(self, i: int, delays: Iterator[float], weight: float = 1.0) -> SendReport:
        def weights(parts: Sequence[TensorPart]) -> Iterator[tuple[str, Tensor]]:
            for part, delay in zip(parts, delays, strict=False):
                time.sleep(delay)
                yield part.name, torch.full(part.size, weight, dtype=torch.bfloat16)

        return self.senders[i].send(weights(self.sources[i]), 0, self.links[i])

    def late(self) -> Iterator[float]:
        """Pauses of a rank that begins when the engine has taken what it takes of others."""
        at_rest(lambda: self.taken)
        yield from never()

    def read(self, engine: int, modules: dict[str, tuple[str, bool]], delays: Iterator[float]) -> int:
        """Bytes that lay in modules without all of theirs, at most, as a loader keeps them."""
        missing = Counter(MODULES[part.name] for link in self.incoming[engine] for part in link.route)
        kept, most = Counter[tuple[str, bool]](), 0
        for item in receive_pieces(self.incoming[engine], 0, modules):
            self.taken += 1
            time.sleep(next(delays))
            module = MODULES[item.part.name]
            kept[module] += item.part.nbytes
            missing[module] -= 1
            if not missing[module]:
                del kept[module], missing[module]
            most = max(most, kept.total())
        assert not missing
        return most


def never() -> Iterator[float]:
    return iter(lambda: 0.0, None)


@pytest.mark.parametrize("modules", [MODULES, {}], ids=["paced", "not"])
def test_what_a_rank_brings_that_is_ahead_stays_in_its_buckets(modules):
    linked = Linked(split(PARTS, 2, 0, replicate=False), 1, repeat(HALF))
    with ThreadPoolExecutor() as threads:
        sending = [threads.submit(linked.send, i, delays) for i, delays in enumerate((never(), linked.late()))]
        most = linked.read(0, modules, never())
        assert not any(one.result().failed for one in sending)
    largest = 3 * HALF  # gate above up, one half of both and a part of the other
    assert (most <= largest) == bool(modules)
    assert modules or most >= len(PARTS) * HALF


def test_who_is_held_back_hears_that_another_gave_up():
    linked = Linked(split(PARTS, 2, 0, replicate=False), 1, repeat(HALF))
    with ThreadPoolExecutor() as threads:
        ahead = threads.submit(linked.send, 0, never())
        diverged = threads.submit(linked.send, 1, linked.late(), math.nan)
        with pytest.raises(RefitError, match=r"the trainer gave up: .*layers\.0\.gate\.weight: .*training diverged"):
            linked.read(0, MODULES, never())
        assert ahead.result().failed == {(0, 0): "the link is closed"}
        with pytest.raises(RefitError, match="training diverged"):
            diverged.result()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_never_wait_for_each_other_by_way_of_engines(seed):
    """A bucket may hold what an engine lacks while its rank waits for another engine; everybody pauses at random."""
    chance = random.Random(seed)
    buckets = iter(lambda: HALF * chance.choice((1, 20)), None)
    linked = Linked(split(PARTS, 2, 0, replicate=False), 3, buckets, timeout=8.0)

    def pauses(most: float) -> Iterator[float]:
        own = random.Random(chance.random())
        return iter(lambda: own.choice((0, 0, 0, own.uniform(0, most))), None)

    with ThreadPoolExecutor() as threads:
        sending = [threads.submit(linked.send, i, pauses(0.1)) for i in range(2)]
        reading = [threads.submit(linked.read, engine, MODULES, pauses(0.02)) for engine in range(3)]
        assert not any(one.result().failed for one in sending)
        assert all(one.result() for one in reading)
