"""Over many random steps, engines that get deltas and engines that get whole versions hold the same bytes."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.refit.bridge import RefitBridge
from tests.refit.memory_engine import MemoryEngines, MemoryTrainer, as_whole, bf16, fp8, random_weights, split

PARTS = [
    fp8("up.weight", 256, 256),
    fp8("down.weight", 130, 384),
    bf16("embed.weight", 100, 128),
    bf16("norm.weight", 64),
]
SHARES = [0.0, 1e-4, 1e-3, 0.02, 0.3, 1.0]
"""Share of the values that a step changes: up to all of them, where whole tensors replace a delta."""
FACTORS = [1.001, 0.5, -1.0, 1.0, 3.0]
"""Factors of the changed values: some change scales, some nothing. Now and then all weights are drawn anew."""


def pair(weights: dict[str, Tensor], mode: Any, scale_format: Any, dims: tuple[int, int]) -> RefitBridge:
    """Make a trainer of two ranks and two engines of two ranks, with matrices split along these dimensions."""
    trainer = MemoryTrainer(weights, split(PARTS, 2, dims[0], replicate=False), scale_format=scale_format)
    engines = MemoryEngines(split(PARTS, 2, dims[1], replicate=True), 2, max_restarts=100)
    return RefitBridge(trainer, engines, mode=mode, bucket_bytes=40_000)


@pytest.mark.parametrize(("scale_format", "dims"), [("pow2", (0, 1)), ("fp32", (1, 0)), ("fp32", (0, 0))])
def test_deltas_and_whole_versions_end_in_the_same_bytes(scale_format, dims):
    torch.manual_seed(0)
    rng, weights = random.Random(f"{scale_format} {dims}"), random_weights(PARTS)
    bridges = {mode: pair(weights, mode, scale_format, dims) for mode in ("full", "delta", "auto")}
    made: Counter[tuple[str, bool]] = Counter()
    for step in range(30):
        share, factor = rng.choice(SHARES), rng.choice(FACTORS)
        weights = {
            name: torch.where(torch.rand(weight.shape) < share, weight * factor, weight)
            for name, weight in weights.items()
        }
        if rng.random() < 0.05:
            weights = random_weights(PARTS, seed=step)
        disturbed = {mode: rng.random() for mode in bridges}
        for mode, bridge in bridges.items():
            engines, trainer = bridge.sink, bridge.source
            assert isinstance(engines, MemoryEngines)
            assert isinstance(trainer, MemoryTrainer)
            trainer.step(**weights)
            if disturbed[mode] < 0.1:
                engines.engines[rng.randrange(2)].kill()
            elif disturbed[mode] < 0.15:
                engines.kill_and_restart(rng.randrange(2))
            elif disturbed[mode] < 0.2:
                for end in rng.choice(trainer.ranks).link_ends.values():
                    end.result().close()
            report = bridge.refit()
            assert report.version == step
            made[mode, report.delta] += 1
            if rng.random() < 0.1:  # while it generates
                engines.kill_and_restart(rng.randrange(2))
        expected = as_whole(PARTS, weights, scale_format)
        for bridge in bridges.values():
            for engine in bridge.sink.engines:
                assert all(content.equals(expected[name]) for name, content in engine.read().items())
    assert made["delta", True] > 15
    assert made["delta", False] > 5
    assert not made["full", True]
    for bridge in bridges.values():
        bridge.source.close()
