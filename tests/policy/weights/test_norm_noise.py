"""Noise on the norms: both published schedules, and one noise for all who draw it."""

import numpy as np
import pytest
import torch

from nemo_fp8rl.config.fp8rl_schema import NoiseConfig
from nemo_fp8rl.policy.weights.norm_noise import NormNoise, describe_small_noise, draw, sigma_of

NAME = "model.layers.1.input_layernorm.weight"


def published(schedule: str, version: int, steps: int, start: float, end: float, stages: int) -> float:
    """The rules as QeRL's code (an array, indexed by equal intervals) and its paper (steps from 1) have them."""
    if schedule == "code":
        sigmas = start * (end / start) ** (np.arange(stages - 1) / (stages - 2))
        number = int(min(version, steps) // (steps / (len(sigmas) + 1)))
        return 0.0 if number == 0 else float(sigmas[min(number - 1, len(sigmas) - 1)])
    number = (version + 1 - 1) // (steps // stages)
    return 0.0 if number == 0 else start * (end / start) ** ((number - 1) / (stages - 1))


@pytest.mark.parametrize("schedule", ["code", "paper"])
@pytest.mark.parametrize(("steps", "stages"), [(600, 10), (30, 3), (44, 11)])
def test_sigmas_are_the_published_ones(schedule, steps, stages):
    noise = NoiseConfig(True, 1e-2, 5e-4, stages, schedule)
    for version in range(steps):
        assert sigma_of(noise, version, steps) == pytest.approx(
            published(schedule, version, steps, 1e-2, 5e-4, stages), rel=1e-12
        )
    last = sigma_of(noise, steps - 1, steps)
    assert last == pytest.approx(5e-4) if schedule == "code" else last > 5e-4
    assert sigma_of(noise, 10 * steps, steps) == last


@pytest.mark.parametrize("schedule", ["code", "paper"])
@pytest.mark.parametrize("steps", [1, 2, 7, 65])
@pytest.mark.parametrize("stages", [3, 4, 10])
def test_sigmas_stay_in_range_where_the_stages_do_not_divide_the_steps(schedule, steps, stages):
    noise = NoiseConfig(True, 1e-2, 5e-4, stages, schedule)
    sigmas = [sigma_of(noise, version, steps) for version in range(steps + 2)]
    assert sigmas[0] == 0
    rest = [sigma for sigma in sigmas if sigma]
    assert rest == sorted(rest, reverse=True)
    assert all(5e-4 * (1 - 1e-12) <= sigma <= 1e-2 for sigma in rest)


def test_noise_follows_from_seed_version_and_name():
    first = draw(7, 3, NAME, 4096)
    assert torch.equal(first, draw(7, 3, NAME, 4096))
    others = [draw(8, 3, NAME, 4096), draw(7, 4, NAME, 4096), draw(7, 3, NAME.replace("1", "2"), 4096)]
    assert not any(torch.equal(first, other) for other in others)
    assert abs(first.mean()) < 0.06
    assert abs(first.std() - 1) < 0.04


def test_noise_is_rounded_once_and_of_two_norms_of_a_layer():
    noise = NormNoise(NoiseConfig(True, stages=3), seed=5, steps=3)
    weight = torch.linspace(0.5, 2, 256).bfloat16()
    expected = (weight.double() + 1e-2 * draw(5, 1, NAME, 256).double()).bfloat16()
    assert (noise.add(NAME, weight, 1) != expected).sum() <= 1  # at a tie of the float32 sum
    assert torch.equal(noise.add(NAME, weight, 0), weight)
    assert noise.concerns("model.layers.0.post_attention_layernorm.weight")
    others = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight")
    assert not any(noise.concerns(name) for name in others)


def test_the_trainers_norms_have_the_noise_only_in_the_block():
    noise, weight = NormNoise(NoiseConfig(True, stages=3, where="both"), seed=5, steps=3), torch.ones(64).bfloat16()
    norms = [(NAME, weight)]
    with noise.applied(lambda: norms):
        assert torch.equal(weight, torch.ones(64).bfloat16())
    noise.version = 1
    with noise.applied(lambda: norms):
        assert torch.equal(weight, noise.add(NAME, torch.ones(64).bfloat16(), 1))
        assert not torch.equal(weight, torch.ones(64).bfloat16())
    assert torch.equal(weight, torch.ones(64).bfloat16())


def test_a_sigma_that_rounds_away_is_announced(recipe):
    keys = ("nemo_fp8rl.noise.enabled=true", "grpo.max_num_steps=30", "policy.precision=bfloat16")
    assert "sigma 5.0e-04 changes 0.0% of the norms' values in bfloat16" in describe_small_noise(
        recipe(*keys, "nemo_fp8rl.noise.stages=3")
    )
    assert describe_small_noise(recipe(*keys, "nemo_fp8rl.noise.stages=3", "nemo_fp8rl.noise.sigma_end=5e-3")) == ""
    assert "has no step after the first" in describe_small_noise(recipe(*keys, "grpo.max_num_steps=1"))
    assert describe_small_noise(recipe()) == ""
