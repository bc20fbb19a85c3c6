"""The histogram of importance weights, held against counting by hand."""

import math

import pytest
import torch

from nemo_fp8rl.algorithms.importance_bins import EDGES
from nemo_fp8rl.algorithms.mismatch import log_weight_histogram


def histogram(*log_weights: float) -> list:
    prev = torch.tensor([log_weights], dtype=torch.float64)
    return log_weight_histogram(prev, torch.zeros_like(prev), torch.ones_like(prev))


def test_every_token_is_in_the_bin_around_its_log_weight():
    torch.manual_seed(0)
    log_weights = torch.randn(4000, dtype=torch.float64).sign() * 10 ** (8 * torch.rand(4000, dtype=torch.float64) - 6)
    bins = histogram(*log_weights.tolist())
    assert sum(count for *_, count in bins) == 4000
    for low, high, count in bins:
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        inside = ((log_weights > low) & (log_weights <= high)).sum()
        assert abs(int(inside) - count) <= 1  # edges are written with six digits
    assert (bins[0][0], bins[-1][1]) == (None, None)


def test_agreement_and_its_last_bits_are_in_the_middle():
    assert histogram(0.0, 1e-7, -9e-5) == [(-0.0001, 0.0001, 3)]


def test_bins_are_symmetric():
    assert tuple(-edge for edge in reversed(EDGES)) == EDGES
    (low, high, _), (other_low, other_high, _) = histogram(-0.02, 0.02)
    assert (low, high) == (-other_high, -other_low)


def test_what_is_masked_or_not_finite_is_in_no_bin():
    prev = torch.tensor([[0.5, float("nan"), -float("inf"), 0.5]])
    gen = torch.tensor([[0.0, 0.0, -float("inf"), 0.0]])
    assert [count for *_, count in log_weight_histogram(prev, gen, torch.tensor([[1.0, 1.0, 1.0, 0.0]]))] == [1]
    assert log_weight_histogram(prev, gen, torch.zeros(1, 4)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_random_number_is_drawn(dtype):
    before = torch.get_rng_state()
    log_weight_histogram(torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype), torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before)
