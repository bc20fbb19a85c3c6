"""Exploration noise on the norms before attention and MLP (`nemo_fp8rl.noise`; QeRL, arXiv 2510.11696, section 3.3).

Each version of the weights has a noise of its own, a function of the seed, the version and the tensor's name. So a
resumed run has the same one, and no layout matters. The trainer's parameters never keep it.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nemo_fp8rl.config.fp8rl_schema import NoiseConfig
from nemo_fp8rl.policy.weights.hf_names import LAYER_TENSORS, layer_prefixes
from nemo_fp8rl.policy.weights.layout import Layout

NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
"""The ends of the HF names of the tensors with noise."""


def noise_sigma(noise: NoiseConfig, total: int, version: int) -> float:
    """Return the standard deviation of the noise of a version of the weights; 0 without noise.

    total:    grpo.max_num_steps
    version:  the number of completed steps; it generates the answers of the step that follows
    Source:   `code`: NVlabs/QeRL, trl_trainer/noise_scheduler.py; `paper`: arXiv 2510.11696, algorithm 1
    """
    if not noise.enabled:
        return 0.0
    if noise.schedule == "code":
        stage, intervals = int(version // (total / noise.stages)), noise.stages - 2
    else:
        stage, intervals = version // max(1, total // noise.stages), noise.stages - 1
    if stage == 0:
        return 0.0
    # further stages, as after the last step, or where `stages` does not divide the steps, are the last one
    exponent = (min(stage, noise.stages - 1) - 1) / intervals
    return noise.sigma_start * (noise.sigma_end / noise.sigma_start) ** exponent


def draw_noise(seed: int, version: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the standard normal numbers of a tensor's noise, float32 of this shape.

    seed:  grpo.seed
    name:  of the tensor in HF
    """
    digest = hashlib.sha256(f"{seed} noise {version} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(generator=generator)


class NormNoise:
    """The noise on one rank's norms, which are whole on every tensor-parallel rank.

    total:    grpo.max_num_steps
    seed:     grpo.seed
    version:  the version that the engines have, or are about to get; -1 before the first
    """

    def __init__(self, noise: NoiseConfig, total: int, seed: int, layout: Layout, model: nn.Module) -> None:
        self.noise, self.total, self.seed, self.layout, self.version = noise, total, seed, layout, -1
        self.is_paused = False
        parameters = dict(model.named_parameters())
        pairs = ((m + norm, layer + hf) for m, layer in layer_prefixes(layout) for norm, hf in LAYER_TENSORS.items())
        self.norms = {name: parameters[megatron] for megatron, name in pairs if name.endswith(NORMS)}

    def concerns(self, name: str) -> bool:
        """Return True for a tensor that has noise in the engine."""
        return self.noise.enabled and name in self.norms

    def add_to(self, weights: Iterable[tuple[str, Any]], version: int) -> Iterator[tuple[str, Any]]:
        """Yield the weights of a refit; norms come as copies with the noise of the version.

        weights:  (HF name, tensor)
        """
        sigma = noise_sigma(self.noise, self.total, version)
        for name, weight in weights:
            yield name, self._noisy(name, weight, sigma, version) if sigma and name in self.norms else weight

    @contextmanager
    def as_in_engines(self) -> Iterator[None]:
        """Give the parameters the engines' values inside the block, where `nemo_fp8rl.noise.where` is `both`."""
        sigma = noise_sigma(self.noise, self.total, self.version) if self.version >= 0 else 0.0
        if not sigma or self.noise.where == "engine" or self.is_paused:
            yield
            return
        parameters = [parameter.detach() for parameter in self.norms.values()]
        clean = [parameter.clone() for parameter in parameters]
        noisy = [self._noisy(name, weight, sigma, self.version) for name, weight in self.norms.items()]
        try:
            torch._foreach_copy_(parameters, noisy)  # in place, because they are views of Megatron's buffers
            yield
        finally:
            torch._foreach_copy_(parameters, clean)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make `as_in_engines` change nothing inside the block."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def count_changes(self, sigma: float) -> tuple[int, int]:
        """Return how many values of this rank's norms a noise of this sigma changes after rounding, and how many there
        are; each norm counts on the one rank that writes it.
        """
        norms = {name: weight for name, weight in self.norms.items() if self.layout.is_writer(name)}
        changed = (int((self._noisy(name, weight, sigma, 0) != weight).sum()) for name, weight in norms.items())
        return sum(changed), sum(weight.numel() for weight in norms.values())

    @torch.no_grad()
    def _noisy(self, name: str, weight: Tensor, sigma: float, version: int) -> Tensor:
        noise = draw_noise(self.seed, version, name, tuple(weight.shape)).to(weight.device) * sigma
        return (weight.detach().float() + noise).to(weight.dtype)
