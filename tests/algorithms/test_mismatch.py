"""Mismatch metrics against float64 formulas; the package computes in float64, so 1e-9 is asked for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.algorithms.mismatch import mismatch_metrics

NAMES = {
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "max_logprob_error",
    "exact_logprob_fraction",
}
logprobs = st.floats(-12, 0, width=32)
tokens = st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=20)


def measure(prev, gen, mask=None) -> dict[str, float]:
    prev, gen = torch.tensor([prev]), torch.tensor([gen])
    return mismatch_metrics(prev, gen, torch.ones_like(prev) if mask is None else torch.tensor([mask]))


def formula(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """NeMo RL's formulas (algorithms/loss_functions.py, ClippedPGLossFn) on Python floats."""

    def mean(values) -> float:
        values = list(values)
        return math.fsum(values) / len(values)

    def k3(log_ratio: float) -> float:
        return math.exp(log_ratio) - 1 - log_ratio

    def js(p: float, g: float) -> float:
        mixture = math.log(0.5 * math.exp(p) + 0.5 * math.exp(g))
        return 0.5 * k3(p - mixture) + 0.5 * k3(g - mixture)

    return {
        "token_mult_prob_error": mean(math.exp(abs(g - p)) for p, g in pairs),
        "gen_kl_error": mean(k3(p - g) for p, g in pairs),
        "policy_kl_error": mean(k3(g - p) for p, g in pairs),
        "js_divergence_error": mean(js(p, g) for p, g in pairs),
        "sampling_importance_ratio": mean(math.exp(p - g) for p, g in pairs),
        "max_logprob_error": max(abs(p - g) for p, g in pairs),
        "exact_logprob_fraction": mean(float(p == g) for p, g in pairs),
    }


@settings(deadline=None, max_examples=80)
@given(tokens)
def test_metrics_equal_the_formulas(pairs):
    # abs: the k3 of the oracle itself cancels at 1e-15
    assert measure(*zip(*pairs, strict=True)) == pytest.approx(formula(pairs), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("difference", [2.0**-20, 2.0**-10])
def test_a_small_divergence_is_not_lost_to_cancellation(difference):
    metrics = measure([-1.0 + difference], [-1.0])
    assert metrics["gen_kl_error"] == pytest.approx(difference**2 / 2, rel=difference)  # l^2/2 + l^3/6 + ...
    assert metrics["policy_kl_error"] == pytest.approx(difference**2 / 2, rel=difference)


@settings(deadline=None, max_examples=30)
@given(st.lists(logprobs, min_size=1, max_size=20))
def test_sides_that_agree_to_the_bit_show_no_mismatch(values):
    assert measure(values, values) == {
        **dict.fromkeys(NAMES, 0.0),
        "token_mult_prob_error": 1.0,
        "sampling_importance_ratio": 1.0,
        "exact_logprob_fraction": 1.0,
        "js_divergence_error": pytest.approx(0.0, abs=1e-15),  # log of the mixture is rounded
    }


@settings(deadline=None, max_examples=40)
@given(tokens, st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 5.0]), min_size=1, max_size=6))
def test_padding_is_never_read(pairs, junk):
    prev, gen = map(list, zip(*pairs, strict=True))
    mask = [1.0] * len(pairs) + [0.0] * len(junk)
    assert measure(prev + junk, gen + junk[::-1], mask) == measure(prev, gen)


@settings(deadline=None, max_examples=40)
@given(tokens, st.randoms(use_true_random=False))
def test_order_of_tokens_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    straight = measure(*zip(*pairs, strict=True))
    assert measure(*zip(*shuffled, strict=True)) == pytest.approx(straight, rel=1e-12, abs=1e-15)


@settings(deadline=None, max_examples=40)
@given(tokens)
def test_exchanging_the_sides_exchanges_the_two_divergences(pairs):
    prev, gen = zip(*pairs, strict=True)
    one, other = measure(prev, gen), measure(gen, prev)
    assert one["gen_kl_error"] == other["policy_kl_error"]
    for name in ("token_mult_prob_error", "js_divergence_error", "max_logprob_error", "exact_logprob_fraction"):
        assert one[name] == pytest.approx(other[name], rel=1e-12, abs=1e-15)


def test_a_mask_that_selects_nothing_is_refused():
    with pytest.raises(ValueError, match="no token"):
        measure([-1.0], [-1.0], [0.0])
