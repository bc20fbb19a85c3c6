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
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.memory_engine import Layout, at_rest, bf16, split

LAYERS = [f"model.layers.{i}" for i in range(12)]
PARTS = [bf16(f"{layer}.{x}.weight", 8, 64) for layer in LAYERS for x in ("gate", "up", "down")]
MODULES = {f"{layer}.{x}.weight": (layer, x == "down") for layer in LAYERS for x in ("gate", "up", "down")}
HALF = 4 * 64 * 2
"""Bytes of half a tensor."""


class LinkedEngines:
    """Senders, and the links of each engine. buckets: bytes of the buckets of each link in turn."""

    def __init__(self, sources: Layout, engines: int, buckets: Iterator[int], timeout: float = 20.0) -> None:
        self.sources = sources
        self.senders = [WeightSender(parts, "pow2") for parts in sources]
        self.links: list[dict[tuple[int, int], Link]] = [{} for _ in sources]
        self.incoming: list[list[IncomingLink]] = [[] for _ in range(engines)]
        self.num_pieces = 0
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

    def delays_until_stalled(self) -> Iterator[float]:
        """Return the delays of a rank that begins when the engine reads no more of the others."""
        at_rest(lambda: self.num_pieces)
        yield from no_delays()

    def read(self, engine: int, modules: dict[str, tuple[str, bool]], delays: Iterator[float]) -> int:
        """Return the largest number of bytes in incomplete modules, which a loader keeps."""
        missing = Counter(MODULES[part.name] for link in self.incoming[engine] for part in link.route)
        stored, most = Counter[tuple[str, bool]](), 0
        for item in receive_pieces(self.incoming[engine], 0, modules):
            self.num_pieces += 1
            time.sleep(next(delays))
            module = MODULES[item.part.name]
            stored[module] += item.part.nbytes
            missing[module] -= 1
            if not missing[module]:
                del stored[module], missing[module]
            most = max(most, stored.total())
        assert not missing
        return most


def no_delays() -> Iterator[float]:
    return iter(lambda: 0.0, None)


@pytest.mark.parametrize("modules", [MODULES, {}], ids=["ordered", "unordered"])
def test_data_of_a_rank_that_is_ahead_stay_in_its_buckets(modules):
    engines = LinkedEngines(split(PARTS, 2, 0, replicate=False), 1, repeat(HALF))
    with ThreadPoolExecutor() as threads:
        sending = [
            threads.submit(engines.send, i, delays)
            for i, delays in enumerate((no_delays(), engines.delays_until_stalled()))
        ]
        most = engines.read(0, modules, no_delays())
        assert not any(send.result().failed for send in sending)
    largest = 3 * HALF  # gate above up, one half of both and a part of the other
    assert (most <= largest) == bool(modules)
    assert modules or most >= len(PARTS) * HALF


def test_a_stalled_rank_notices_that_another_gave_up():
    engines = LinkedEngines(split(PARTS, 2, 0, replicate=False), 1, repeat(HALF))
    with ThreadPoolExecutor() as threads:
        ahead = threads.submit(engines.send, 0, no_delays())
        diverged = threads.submit(engines.send, 1, engines.delays_until_stalled(), math.nan)
        with pytest.raises(RefitError, match=r"the trainer gave up: .*layers\.0\.gate\.weight: .*training diverged"):
            engines.read(0, MODULES, no_delays())
        assert ahead.result().failed == {(0, 0): "the link is closed"}
        with pytest.raises(RefitError, match="training diverged"):
            diverged.result()


@pytest.mark.parametrize("seed", range(6))
def test_ranks_do_not_deadlock_through_engines(seed):
    """A bucket may hold what an engine lacks while its rank waits for another engine; both sides pause at random."""
    chance = random.Random(seed)
    buckets = iter(lambda: HALF * chance.choice((1, 20)), None)
    engines = LinkedEngines(split(PARTS, 2, 0, replicate=False), 3, buckets, timeout=8.0)

    def pauses(most: float) -> Iterator[float]:
        pause = random.Random(chance.random())
        return iter(lambda: pause.choice((0, 0, 0, pause.uniform(0, most))), None)

    with ThreadPoolExecutor() as threads:
        sending = [threads.submit(engines.send, i, pauses(0.1)) for i in range(2)]
        reading = [threads.submit(engines.read, engine, MODULES, pauses(0.02)) for engine in range(3)]
        assert not any(send.result().failed for send in sending)
        assert all(one.result() for one in reading)
