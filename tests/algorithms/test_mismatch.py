"""Mismatch metrics against float64 formulas, NeMo RL's in Python and verl's in numpy; the package computes in float64
too, so 1e-9 is asked for.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.algorithms import mismatch
from nemo_fp8rl.algorithms.metric_names import METRICS
from nemo_fp8rl.algorithms.mismatch import MismatchSums, mismatch_metrics, sum_disagreement

NEMO_RL = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error")
GARBAGE = [math.nan, math.inf, -math.inf, 5.0]
logprobs = st.floats(-12, 0, width=32)
tokens = st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=20)


def measure(prev, gen, mask=None) -> dict[str, float]:
    prev, gen = torch.tensor([prev]), torch.tensor([gen])
    return mismatch_metrics(prev, gen, torch.ones_like(prev) if mask is None else torch.tensor([mask]))


def formula(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """NeMo RL's formulas (algorithms/loss/loss_functions.py, ClippedPGLossFn) and ours by token, on Python floats."""

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
        "max_logprob_error": max(abs(p - g) for p, g in pairs),
        "exact_logprob_fraction": mean(float(p == g) for p, g in pairs),
        "nonfinite_logprob_ratio": 0.0,
    }


def verl_formula(sequences: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """verl's formulas (trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics; utils/debug/metrics.py), float64.

    sequences: (prev, gen) of each row's tokens; no row is empty. ESS as the issue has it: on weights not truncated.
    """
    prev, gen = (np.concatenate(side) for side in zip(*sequences, strict=True))
    weights = np.exp(np.clip(prev - gen, -20, 20))
    mean_prev = np.array([p.mean() for p, _ in sequences])
    mean_gen = np.array([g.mean() for _, g in sequences])
    seq_weights = np.exp(np.clip([(p - g).sum() for p, g in sequences], -20, 20))
    metrics = {
        "kl": (gen - prev).mean(),
        "k3_kl": (np.exp(prev - gen) - (prev - gen) - 1).mean(),
        "training_ppl": np.exp(-mean_prev).mean(),
        "rollout_ppl": np.exp(-mean_gen).mean(),
        "ppl_ratio": np.exp(mean_gen - mean_prev).mean(),
        "log_ppl_diff": (mean_gen - mean_prev).mean(),
        "chi2_token": (weights**2).mean() - 1,
        "chi2_seq": (seq_weights**2).mean() - 1,
        "ess": 1 / ((weights / weights.mean()) ** 2).mean(),
        "ess_seq": 1 / ((seq_weights / seq_weights.mean()) ** 2).mean(),
    }
    probabilities = np.exp(prev), np.exp(gen)
    if all(p.std() > 1e-5 * p.mean() for p in probabilities):
        metrics["probs_pearson_corr"] = np.corrcoef(*probabilities)[0, 1]
    return {name: float(value) for name, value in metrics.items()}


@st.composite
def batches(draw):
    """(prev, gen, mask) [B, T] with ragged rows, rows without tokens, lost tokens and garbage in the padding."""
    b, t = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    shape = {"min_size": t, "max_size": t}
    kinds = st.sampled_from(["token", "token", "token", "padding", "padding", "lost prev", "lost gen"])
    prev, gen, mask = torch.zeros(b, t), torch.zeros(b, t), torch.zeros(b, t)
    for i in range(b):
        own = draw(st.lists(kinds, **shape)) if draw(st.integers(0, 3)) else ["padding"] * t
        if i == 0:
            own[draw(st.integers(0, t - 1))] = "token"
        prev[i] = torch.tensor(draw(st.lists(logprobs, **shape)))
        gen[i] = torch.tensor(draw(st.lists(logprobs, **shape)))
        for j, kind in enumerate(own):
            mask[i, j] = float(kind != "padding")
            if kind in ("padding", "lost prev"):
                prev[i, j] = draw(st.sampled_from(GARBAGE[: 4 if kind == "padding" else 3]))
            if kind in ("padding", "lost gen"):
                gen[i, j] = draw(st.sampled_from(GARBAGE[: 4 if kind == "padding" else 3]))
    return prev, gen, mask


def rows_of(prev, gen, mask) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """(finite tokens of each row that has any, float64; number of lost tokens)."""
    rows, lost = [], 0
    for p, g, m in zip(prev.double().numpy(), gen.double().numpy(), mask.numpy(), strict=True):
        live = (m > 0) & np.isfinite(p) & np.isfinite(g)
        lost += int((m > 0).sum() - live.sum())
        if live.any():
            rows.append((p[live], g[live]))
    return rows, lost


def seen(*microbatches) -> MismatchSums:
    sums = MismatchSums()
    for microbatch in microbatches:
        sums.observe(*microbatch)
    return sums


@settings(deadline=None, max_examples=80)
@given(tokens)
def test_metrics_by_token_equal_the_formulas(pairs):
    metrics = measure(*zip(*pairs, strict=True))
    expected = formula(pairs)
    # abs: the k3 of the oracle itself cancels at 1e-15
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-13)


@settings(deadline=None, max_examples=150)
@given(batches())
def test_metrics_of_ragged_batches_equal_the_formulas(batch):
    rows, lost = rows_of(*batch)
    pairs = [pair for row in rows for pair in zip(*row, strict=True)]
    expected = formula(pairs) | verl_formula(rows) | {"nonfinite_logprob_ratio": lost / (lost + len(pairs))}
    metrics = mismatch_metrics(*batch)
    assert tuple(metrics) == METRICS or tuple(metrics) == METRICS[:-1]
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=80)
@given(batches(), st.randoms(use_true_random=False))
def test_microbatches_in_any_order_equal_one_pass(batch, random):
    cuts = sorted(random.choices(range(len(batch[0]) + 1), k=3))
    parts = [
        tuple(field[start:stop] for field in batch)
        for start, stop in zip([0, *cuts], [*cuts, len(batch[0])], strict=True)
    ]
    sums, whole = MismatchSums(), seen(batch)
    for part in random.sample(parts, len(parts)):
        sums.observe(*part)
    # 1e-9: of the values themselves, except those of a mean that cancels
    assert sums.metrics() == pytest.approx(whole.metrics(), rel=1e-9, abs=1e-12)
    assert sums.by_position() == pytest.approx(whole.by_position(), rel=1e-9)


def long_batch(rows: int = 40, length: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Realistic log-probs, l of 0.05, answers of any length."""
    generator = torch.Generator().manual_seed(0)
    gen = -3 * torch.rand(rows, length, generator=generator)
    prev = gen + 0.05 * torch.randn(rows, length, generator=generator)
    column = torch.arange(length)
    first = torch.randint(0, length // 3, (rows, 1), generator=generator)
    last = first + torch.randint(0, 2 * length // 3, (rows, 1), generator=generator)
    return prev, gen, ((column >= first) & (column < last)).float()


@pytest.mark.parametrize("tokens_at_once", [1, 1000, 10**6])
def test_rows_taken_at_once_do_not_matter(tokens_at_once, monkeypatch):
    batch = long_batch()
    expected = verl_formula(rows_of(*batch)[0])
    monkeypatch.setitem(mismatch.TOKENS_AT_ONCE, "cpu", tokens_at_once)
    metrics = mismatch_metrics(*batch)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    sums = sum_disagreement(*batch[:2], batch[2] > 0)
    assert {n: float(s / batch[2].sum()) for n, s in sums.items()} == pytest.approx({n: metrics[n] for n in NEMO_RL})


@settings(deadline=None, max_examples=60)
@given(batches())
def test_disagreement_is_the_sum_of_the_errors_and_reads_nothing_outside(batch):
    prev, gen, mask = batch
    sums = sum_disagreement(prev, gen, mask > 0)
    rows, _ = rows_of(*batch)
    pairs = [pair for row in rows for pair in zip(*row, strict=True)]
    expected = {name: formula(pairs)[name] * len(pairs) for name in NEMO_RL}
    assert {name: value.item() for name, value in sums.items()} == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert all(value.dtype == torch.float64 for value in sums.values())


@pytest.mark.parametrize("difference", [2.0**-20, 2.0**-10])
def test_a_small_divergence_is_not_lost_to_cancellation(difference):
    metrics = measure([-1.0 + difference], [-1.0])
    assert metrics["gen_kl_error"] == pytest.approx(difference**2 / 2, rel=difference)  # l^2/2 + l^3/6 + ...
    assert metrics["policy_kl_error"] == pytest.approx(difference**2 / 2, rel=difference)
    assert metrics["js_divergence_error"] == pytest.approx(difference**2 / 8, rel=difference)  # l^2/8 - l^4/192 + ...
    assert metrics["chi2_token"] == pytest.approx(math.expm1(2 * difference), rel=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.lists(logprobs, min_size=1, max_size=20))
def test_sides_that_agree_to_the_bit_show_no_mismatch(values):
    metrics = measure(values, values)
    assert metrics.pop("training_ppl") == metrics.pop("rollout_ppl") >= 1
    assert metrics.pop("probs_pearson_corr", 1.0) == pytest.approx(1.0, abs=1e-12)
    assert metrics == {
        **dict.fromkeys(metrics, 0.0),
        **dict.fromkeys(("token_mult_prob_error", "exact_logprob_fraction", "ppl_ratio", "ess", "ess_seq"), 1.0),
    }


@settings(deadline=None, max_examples=40)
@given(tokens, st.lists(st.sampled_from(GARBAGE), min_size=1, max_size=6))
def test_padding_is_never_read(pairs, junk):
    prev, gen = map(list, zip(*pairs, strict=True))
    mask = [1.0] * len(pairs) + [0.0] * len(junk)
    assert measure(prev + junk, gen + junk[::-1], mask) == pytest.approx(measure(prev, gen), rel=1e-12, abs=1e-15)


@settings(deadline=None, max_examples=40)
@given(tokens, st.randoms(use_true_random=False))
def test_order_of_tokens_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    straight = measure(*zip(*pairs, strict=True))
    assert measure(*zip(*shuffled, strict=True)) == pytest.approx(straight, rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(tokens)
def test_exchanging_the_sides_exchanges_the_two_divergences(pairs):
    prev, gen = zip(*pairs, strict=True)
    one, other = measure(prev, gen), measure(gen, prev)
    assert one["gen_kl_error"] == other["policy_kl_error"]
    assert one["kl"] == -other["kl"]
    for name in ("token_mult_prob_error", "js_divergence_error", "max_logprob_error", "exact_logprob_fraction"):
        assert one[name] == pytest.approx(other[name], rel=1e-12, abs=1e-15)


def test_rows_without_tokens_dilute_nothing():
    prev, gen, mask = long_batch(rows=7)
    empty = torch.full((5, prev.size(1)), math.nan)
    padded = (torch.cat([prev, empty]), torch.cat([gen, empty]), torch.cat([mask, torch.zeros_like(empty)]))
    assert mismatch_metrics(*padded) == pytest.approx(mismatch_metrics(prev, gen, mask), rel=1e-12)


def test_a_token_without_finite_logprob_is_counted_and_left_out():
    whole = measure([-1.0, -2.0, -math.inf, -0.5], [-1.5, math.nan, -1.0, -0.25])
    rest = measure([-1.0, -0.5], [-1.5, -0.25])
    assert whole == pytest.approx(rest | {"nonfinite_logprob_ratio": 0.5}, rel=1e-12, abs=1e-15)


def test_where_no_token_has_a_finite_logprob_the_metrics_are_undefined():
    metrics = measure([math.nan, -1.0], [-1.0, -math.inf])
    assert metrics.pop("nonfinite_logprob_ratio") == 1.0
    assert len(metrics) == len(METRICS) - 2
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize("distance", [100.0, 1e5, 1e30])
@pytest.mark.parametrize("sign", [-1, 1])
def test_exponents_are_clamped_so_that_nothing_overflows(distance, sign):
    metrics = measure([-0.5, -1.0 if sign > 0 else -distance], [-0.5, -distance if sign > 0 else -1.0])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["token_mult_prob_error"] == pytest.approx((1 + math.exp(60)) / 2)
    assert metrics["chi2_token"] == pytest.approx(((math.exp(40 * sign) + 1) / 2) - 1)
    assert metrics["max_logprob_error"] == pytest.approx(distance, rel=0.01)


@pytest.mark.parametrize("values", [[-1.0], [-1.0, -1.0, -1.0]])
def test_a_correlation_without_variance_is_left_out(values):
    assert "probs_pearson_corr" not in measure(values, [-1.5 - 0.1 * i for i in range(len(values))])


@pytest.mark.parametrize("apart", [6.2e-5, 1e-5])
@pytest.mark.parametrize("common", [0.0, -1.0, -4.0])
def test_probabilities_that_are_almost_the_same_correlate_as_they_do(common, apart):
    prev, gen = [common] * 3 + [common - apart], [common, common - 1e-4, common, common - 2 * apart]
    prev, gen = (torch.tensor([row]) for row in (prev, gen))
    expected = np.corrcoef(*(np.exp(side[0].double().numpy()) for side in (prev, gen)))[0, 1]
    alone, together = MismatchSums(), MismatchSums()
    alone.observe(prev, gen, torch.ones(1, 4))
    for cut in (slice(1), slice(1, 4)):
        together.observe(prev[:, cut], gen[:, cut], torch.ones(1, 4)[:, cut])
    for sums in (alone, together):
        assert sums.metrics()["probs_pearson_corr"] == pytest.approx(expected, rel=1e-9)


def test_probabilities_that_rise_together_correlate():
    gen = [-0.1, -1.0, -2.0, -3.0]
    assert measure([g + math.log(0.5) for g in gen], gen)["probs_pearson_corr"] == pytest.approx(1.0, abs=1e-6)
    assert measure([math.log(1.01 - math.exp(g)) for g in gen], gen)["probs_pearson_corr"] == pytest.approx(-1.0)


def test_errors_by_position_count_from_the_first_generated_token():
    prev, gen, mask = long_batch()
    assert len({int(row.argmax()) for row in mask if row.any()}) > 10, "answers must begin at different columns"
    buckets: dict[str, list[float]] = {}
    for p, g, m in zip(prev.double(), gen.double(), mask, strict=True):
        for position, i in enumerate(m.nonzero()[:, 0].tolist()):
            low = 1 << (position.bit_length() - 1) if position else 0
            name = f"{low}_{2 * low - 1}" if low > 1 else f"{low}"
            buckets.setdefault(name, []).append(float(p[i] - g[i]))
    expected = {}
    for name, differences in buckets.items():
        count = len(differences)
        expected[f"gen_kl_error/position_{name}"] = math.fsum(math.exp(x) - 1 - x for x in differences) / count
        expected[f"mean_logprob_error/position_{name}"] = math.fsum(map(abs, differences)) / count
    assert "gen_kl_error/position_128_255" in expected, "the batch must be long enough to tell buckets apart"
    assert seen((prev, gen, mask)).by_position() == pytest.approx(expected, rel=1e-9)


def test_positions_count_tokens_that_were_not_generated_in_between():
    prev, gen = torch.tensor([[-9.0, -1.0, -9.0, -9.0, -1.0]]), torch.tensor([[0.0, -1.5, 0.0, 0.0, -1.25]])
    positions = seen((prev, gen, torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0]]))).by_position()
    assert {name: value for name, value in positions.items() if name.startswith("mean")} == {
        "mean_logprob_error/position_0": 0.5,
        "mean_logprob_error/position_2_3": 0.25,
    }


def test_a_lost_first_token_still_is_position_0():
    sums = seen((torch.tensor([[math.nan, -1.0]]), torch.tensor([[-1.0, -1.5]]), torch.ones(1, 2)))
    assert set(sums.by_position()) == {"gen_kl_error/position_1", "mean_logprob_error/position_1"}


def test_the_last_bucket_of_positions_has_no_end():
    length = 2**20 + 3
    gen = torch.zeros(1, length)
    prev = torch.zeros(1, length)
    prev[0, 2**20 :] = -1.0
    positions = seen((prev, gen, torch.ones(1, length))).by_position()
    assert positions["mean_logprob_error/position_524288_1048575"] == 0.0
    assert positions["mean_logprob_error/position_1048576_on"] == 1.0


@pytest.mark.parametrize("shape", [(1, 1), (0, 3), (2, 0)])
def test_a_mask_that_selects_nothing_is_refused(shape):
    zeros = torch.zeros(shape)
    with pytest.raises(ValueError, match="no token"):
        mismatch_metrics(zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("prev", "gen", "mask", "why"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(2, 4),
            torch.zeros(2, 3),
            r"generation_logprobs \[2, 4\].* must all be \[B, T\]",
        ),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), r"mask \[2\] must all be \[B, T\]"),
        (torch.zeros(3), torch.zeros(3), torch.zeros(3), r"must all be \[B, T\]"),
        (torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.ones(2, 3), "floating point, got torch.int64"),
    ],
)
@pytest.mark.parametrize("function", [mismatch_metrics, sum_disagreement])
def test_shapes_and_dtypes_that_do_not_fit_are_refused(function, prev, gen, mask, why):
    with pytest.raises(ValueError, match=why):
        function(prev, gen, mask)
