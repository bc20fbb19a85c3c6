"""Stochastic rounding keeps values on average, within what chance allows, and takes a neighbour each time."""

import math

import pytest
import torch

from nemo_fp8rl.fp8 import NVFP4, encode_scale, fake_quantize
from nemo_fp8rl.fp8.block_scaled import E2M1_VALUES
from nemo_fp8rl.fp8.fp4_training.random_bits import GradientBits
from nemo_fp8rl.fp8.fp4_training.stochastic_rounding import fake_quantize_stochastically, round_to_e2m1

CPU = torch.device("cpu")
REPEATS = 4096


def draw(shape: tuple[int, ...], call: int = 0) -> torch.Tensor:
    trainer = GradientBits(11)
    return [trainer.start_call("layer") for _ in range(call + 1)][-1].draw(0, shape, CPU)


def test_values_are_kept_on_average():
    values = torch.cat([torch.linspace(-6, 6, 241), torch.tensor([0.001, -0.3, 3.999])])
    rounded = round_to_e2m1(values.expand(REPEATS, -1), draw((REPEATS, len(values))))
    # between neighbours at a distance d the variance is d^2 / 4 at most; draws of 16 bits are off by 2^-17 d
    width = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    error = (rounded.double().mean(0) - values.double()).abs()
    assert (error <= width * (5 * 0.5 / math.sqrt(REPEATS) + 2.0**-17)).all()
    to_nearest = round_to_e2m1(values, torch.full_like(values, 2.0**15))
    assert ((to_nearest - values).abs() > 3 * width * 5 * 0.5 / math.sqrt(REPEATS)).any()  # the bound tells them apart


def test_each_value_goes_to_one_of_its_neighbours():
    grid = torch.tensor(sorted({sign * value for value in E2M1_VALUES for sign in (-1, 1)}))
    values = torch.linspace(-6, 6, 1001)
    lower = grid[torch.searchsorted(grid, values, right=True) - 1]
    upper = grid[torch.searchsorted(grid, values)]
    for call in range(4):
        rounded = round_to_e2m1(values, draw((1001,), call))
        assert ((rounded == lower) | (rounded == upper)).all()
    assert torch.equal(round_to_e2m1(grid, torch.zeros_like(grid)), grid)
    assert torch.equal(round_to_e2m1(grid, torch.full_like(grid, 2.0**16 - 1)), grid)
    assert round_to_e2m1(torch.tensor([7.0, -9.0]), torch.zeros(2)).tolist() == [6.0, -6.0]


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize(("block", "shape"), [((1, 16), (3, 40)), ((16, 1), (24, 5))])
def test_a_tensor_is_kept_on_average_in_its_blocks(scale_format, block, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    x.view(-1)[::16] = 0.0
    encode = encode_scale(x.abs().amax(), scale_format)
    kept = [
        fake_quantize_stochastically(x, block, encode, draw(shape, call), torch.float32).double() for call in range(256)
    ]
    mean, nearest = torch.stack(kept).mean(0), fake_quantize(x, format=NVFP4, block=block, scale_format=scale_format)
    step = 2 * x.abs().amax() / 6
    saturates = x.abs() > nearest.abs().amax() * 0.9  # the rounding of its scale may put a block's largest above 6
    assert ((mean - x).abs()[~saturates] <= 5 * step / 2 / math.sqrt(256)).all()
    assert (mean - x).norm() < 0.35 * (nearest - x).norm()
    assert torch.equal(kept[0], fake_quantize_stochastically(x, block, encode, draw(shape), torch.float32).double())
    assert not torch.equal(kept[0], kept[1])


def test_a_value_that_is_not_finite_stays_visible():
    x = torch.full((1, 32), 6.0)
    x[0, 3] = torch.nan
    kept = fake_quantize_stochastically(x, (1, 16), torch.tensor(64.0), draw((1, 32)), torch.float32)
    assert kept[0, :16].isnan().all() and torch.equal(kept[0, 16:], x[0, 16:])
