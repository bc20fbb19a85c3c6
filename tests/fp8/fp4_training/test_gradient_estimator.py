"""The estimated slope of rounding to E2M1, at the values of MS-AMP's kernel."""

import itertools

import pytest
import torch

from nemo_fp8rl.fp8 import encode_scale
from nemo_fp8rl.fp8.block_scaled import E2M1_VALUES
from nemo_fp8rl.fp8.fp4_training.gradient_estimator import estimated_slope, weight_slope


@pytest.mark.parametrize(
    ("x", "low", "width"),
    [
        *((5.5, 4, 2), (4.0, 4, 2), (3.9, 3, 1), (3.0, 3, 1), (2.3, 2, 1), (1.9, 1.5, 0.5), (1.0, 1, 0.5)),
        *((0.7, 0.5, 0.5), (0.01, 0, 0.5), (0.0, 0, 0.5)),
        *((-0.1, -0.5, 0.5), (-0.5, -0.5, 0.5), (-1.4, -1.5, 0.5), (-2.6, -3, 1), (-3.25, -4, 1), (-4.2, -6, 2)),
    ],
)
def test_the_slope_is_ms_amps(x, low, width):
    """operators/fp4_quantize/quantize.cu, with its intervals written out."""
    expected = min(abs(2 * (x - low) / width - 1) ** (1 / 5 - 1) / 5, 3.0)
    assert float(estimated_slope(torch.tensor(x))) == pytest.approx(expected, rel=1e-4)


def test_it_is_a_fifth_at_the_values_of_the_format_and_three_in_the_middle():
    values = torch.tensor(E2M1_VALUES)
    middles = (values[1:] + values[:-1]) / 2
    torch.testing.assert_close(estimated_slope(torch.cat([values, -values])), torch.full((16,), 0.2))
    assert estimated_slope(torch.cat([middles, -middles])).tolist() == [3.0] * 14
    assert float(estimated_slope(torch.tensor(6.4))) == pytest.approx(0.2)  # the scale was rounded down


def test_the_mean_slope_of_an_interval_is_that_of_the_limited_power():
    """Without the limit it is 1. The limit of 3 holds where |2 (x - low) / width - 1| is below 15^-1.25."""
    limited = 15**-1.25
    mean = 3 * limited + 1 - limited**0.2
    for low, high in itertools.pairwise(E2M1_VALUES):
        points = torch.linspace(low, high, 100_001, dtype=torch.float64)[:-1].float()
        assert float(estimated_slope(points).mean()) == pytest.approx(mean, abs=1e-3)


def test_a_weight_is_taken_in_units_of_its_blocks():
    w = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)) * 0.02
    w[:16, :16] *= 37
    encode = encode_scale(w.abs().amax(), "pow2")
    slopes = weight_slope(w, (16, 16), encode, flush=True)
    for rows in (slice(0, 16), slice(16, 32)):
        for columns in (slice(0, 16), slice(16, 32), slice(32, 48)):
            block = w[rows, columns]
            scale = (block.abs().amax() / 6 * encode).to(torch.float8_e4m3fn).float() / encode
            torch.testing.assert_close(slopes[rows, columns], estimated_slope(block / scale), rtol=1e-3, atol=1e-3)
    assert torch.equal(weight_slope(w, (16, 16), encode / 8, flush=True), slopes)  # free of the global scale
