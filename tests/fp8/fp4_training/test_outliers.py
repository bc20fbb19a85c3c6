"""Clamp and rest sum to the activation, token by token."""

import pytest
import torch

from nemo_fp8rl.fp8 import NVFP4, LinearRecipe, fake_quantize_tokens
from nemo_fp8rl.fp8.fp4_training.outliers import split_outliers


def activations() -> torch.Tensor:
    x = torch.randn(12, 200, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 30
    return x.bfloat16()


@pytest.mark.parametrize(("quantile", "beyond"), [(0.999, 0), (0.99, 2), (0.95, 10), (0.6, 80)])
def test_the_parts_sum_to_the_activation_to_the_bit(quantile, beyond):
    x = activations()
    clamped, rest = split_outliers(x, quantile)
    assert clamped.dtype is torch.bfloat16 and torch.equal(clamped.float() + rest, x.float())
    outside = (rest != 0).expand(x.shape).sum(1)
    assert (outside <= 2 * beyond).all()
    assert (outside >= beyond).all()  # equal values may lie on a bound
    for token, kept in zip(x.float(), clamped.float(), strict=True):
        ordered = token.sort().values
        assert (kept.min(), kept.max()) == (ordered[beyond], ordered[-1 - beyond])


def test_a_token_does_not_depend_on_its_batch_and_there_may_be_none():
    x = activations()
    clamped, rest = split_outliers(x, 0.97)
    for token in range(len(x)):
        alone = split_outliers(x[token : token + 1], 0.97)
        assert torch.equal(alone[0][0], clamped[token]) and torch.equal(alone[1][0], rest[token])
    assert split_outliers(x[:0], 0.97)[0].shape == (0, 200)


def test_the_rest_is_kept_in_high_precision():
    x = activations()
    exact = x.float()
    plain = fake_quantize_tokens(x, NVFP4, dtype=torch.float32)
    clamped, rest = split_outliers(x, 0.99)
    kept = LinearRecipe(NVFP4, clamp_quantile=0.99).token_values(x, torch.bfloat16)
    assert torch.equal(kept, fake_quantize_tokens(clamped, NVFP4, dtype=torch.float32) + rest)
    assert (kept - exact).norm() < 0.8 * (plain - exact).norm()
