"""Exploration noise on the norms before attention and MLP: adaptive quantization noise of QeRL (arXiv 2510.11696).

The noise of a version is a function of grpo.seed, the version and the tensor's name. So a resumed run, every rank and
every layout have the same. Version v is what engines have after v steps, and they answer the prompts of step v + 1 with
it. The parameters themselves never have the noise.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.config.fp8rl_schema import NoiseConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.hub import checkpoint_folder

NORM = re.compile(r"model\.layers\.\d+\.(input|post_attention)_layernorm\.weight")
SMALLEST_SHARE = 0.1
"""Share of the norms' values that noise must change; below it a sentence says that the noise rounds away."""


def sigma_of(noise: NoiseConfig, version: int, steps: int) -> float:
    """Return the standard deviation of a version's noise; 0 in the first stage and without noise.

    version:  the number of completed steps; beyond the run it has the last stage's sigma
    steps:    grpo.max_num_steps
    Source: QeRL's `noise_scheduler.py`; Algorithm 1 of arXiv 2510.11696, whose steps count from 1
    """
    if not noise.enabled:
        return 0.0
    if noise.schedule == "code":
        stage = int(min(version, steps) // (steps / noise.stages))
        intervals = noise.stages - 2
    else:
        stage = version // max(steps // noise.stages, 1)
        intervals = noise.stages - 1
    stage = min(stage, noise.stages - 1)
    if stage == 0:
        return 0.0
    return noise.sigma_start * (noise.sigma_end / noise.sigma_start) ** ((stage - 1) / intervals)


def draw(seed: int, version: int, name: str, size: int) -> Tensor:
    """Return normal numbers of the whole tensor `name`, float32 [size]."""
    generator = torch.Generator().manual_seed(Random(f"norm noise {seed} {version} {name}").getrandbits(63))
    return torch.randn(size, generator=generator, dtype=torch.float32)


class NormNoise:
    """The noise of one rank.

    steps:    grpo.max_num_steps
    version:  the version whose noise the trainer computes with; None for no noise, as before the first refit
    """

    def __init__(self, noise: NoiseConfig, seed: int, steps: int) -> None:
        self.noise, self.seed, self.steps = noise, seed, steps
        self.version: int | None = None

    @classmethod
    def of(cls, cfg: Config) -> "NormNoise":
        return cls(cfg.nemo_fp8rl.noise, cfg.grpo.seed, cfg.grpo.max_num_steps)

    @property
    def is_in_trainer(self) -> bool:
        return self.noise.enabled and self.noise.where == "both"

    def concerns(self, name: str) -> bool:
        """Return whether the tensor with this HF name gets noise."""
        return self.noise.enabled and NORM.fullmatch(name) is not None

    def add(self, name: str, weight: Tensor, version: int) -> Tensor:
        """Return a norm's weight with the noise of a version, rounded once to the weight's dtype."""
        return self._add(name, weight, version, sigma_of(self.noise, version, self.steps))

    def _add(self, name: str, weight: Tensor, version: int, sigma: float) -> Tensor:
        if not sigma:
            return weight
        noise = draw(self.seed, version, name, weight.numel()).mul_(sigma).view(weight.shape)
        return (weight.float() + noise.to(weight.device)).to(weight.dtype)

    def add_to_parts(self, parts: Iterable[tuple[str, Any]], version: int) -> Iterator[tuple[str, Any]]:
        """Yield the parts with the noise of a version on the norms."""
        for name, part in parts:
            yield name, self.add(name, part, version) if self.concerns(name) else part

    @contextmanager
    def applied(self, norms: Callable[[], Iterable[tuple[str, Tensor]]]) -> Iterator[None]:
        """Give the trainer's norms the noise of `version` during the block; without a version do nothing.

        norms:  returns the HF names and the parameters
        """
        if self.version is None or not sigma_of(self.noise, self.version, self.steps):
            yield
            return
        clean = [(name, weight, weight.clone()) for name, weight in norms() if self.concerns(name)]
        try:
            for name, weight, _ in clean:
                weight.copy_(self.add(name, weight, self.version))
            yield
        finally:
            for _, weight, values in clean:
                weight.copy_(values)

    def share_of_changes(self, weights: Iterable[tuple[str, Tensor]], sigma: float) -> float:
        """Return the share of values that noise of this sigma changes."""
        changes = [self._add(name, weight, 0, sigma) != weight for name, weight in weights]
        return float(torch.cat([part.flatten() for part in changes]).float().mean())


def describe_small_noise(cfg: Config) -> str:
    """Return a sentence about sigmas that round away in the weights' dtype; "" where there are none.

    It reads the norms of policy.model_name.
    """
    noise, steps = NormNoise.of(cfg), cfg.grpo.max_num_steps
    if not noise.noise.enabled:
        return ""
    dtype: torch.dtype = getattr(torch, cfg.policy.precision)
    with CheckpointReader(checkpoint_folder(cfg.policy.model_name, weights=True)) as reader:
        norms = [(name, reader.get(name).to(dtype)) for name in sorted(reader.names) if noise.concerns(name)]
    sigmas = sorted({sigma_of(noise.noise, version, steps) for version in range(steps)} - {0.0}, reverse=True)
    if not sigmas:
        return (
            f"nemo_fp8rl.noise: grpo.max_num_steps={steps} has no step after the first of "
            f"nemo_fp8rl.noise.stages={noise.noise.stages} stages, which has no noise"
        )
    for sigma in sigmas:
        share = noise.share_of_changes(norms, sigma)
        if share < SMALLEST_SHARE:
            return (
                f"nemo_fp8rl.noise: sigma {sigma:.1e} changes {share:.1%} of the norms' values in "
                f"{cfg.policy.precision}, so from there on the noise rounds away: raise nemo_fp8rl.noise.sigma_end"
            )
    return ""
