"""The losses against double precision, token by token (reference.py): values and gradients of every mode, and edges.

Tolerance: inputs are float64, and the float32 weights of the correction are good to 2e-7 on the log-probs of
`make_batch`, so 1e-6 relative; of the loss, relative to the sum of what it adds up, since terms cancel.
"""

import ast
import math
import os
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.algorithms import loss as loss_module
from nemo_fp8rl.algorithms.correction_config import CorrectionConfig, Rule
from nemo_fp8rl.algorithms.loss import GrpoLoss, NllLoss, combine_metrics, kl_estimate
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.batch import split_shards
from nemo_fp8rl.common.errors import UserError
from tests.algorithms import reference
from tests.algorithms.losses import make_loss
from tests.algorithms.reference import GARBAGE, Totals, inside, make_batch, totals
from tests.batches import columns_of, correct_columns, loss_of_columns, stage_of

PLAIN = {"reference_policy_kl_penalty": 0.0}
GSPO = PLAIN | {"sequence_level_importance_ratios": True, "token_level_loss": False}


def truncated(kind: str | None, high: float | None = None, low: float | None = None) -> dict[str, Any]:
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


AGGREGATIONS = {
    "token-mean": {},
    "seq-mean-token-mean": {"token_level_loss": False},
    "seq-mean-token-sum": {"token_level_loss": False, "loss_agg_mode": "seq-mean-token-sum"},
    "dr-grpo": {"token_level_loss": False, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7.0},
}
RATIOS = {
    "clip": PLAIN,
    "narrow": PLAIN | {"ratio_clip_min": 0.01, "ratio_clip_max": 0.02},
    "clip-higher": PLAIN | {"ratio_clip_min": 0.1, "ratio_clip_max": 0.28},
    "dual": PLAIN | {"ratio_clip_c": 1.1},
    "reinforce": PLAIN | {"disable_ppo_ratio": True},
    "on-policy": PLAIN | {"force_on_policy_ratio": True},
    "gspo": PLAIN | {"sequence_level_importance_ratios": True, "ratio_clip_min": 0.05, "ratio_clip_max": 0.05},
    "gspo dual": PLAIN | {"sequence_level_importance_ratios": True, "ratio_clip_c": 1.02},
    "cispo": PLAIN | {"use_cispo": True},
}
MODES = {
    f"{ratio} {aggregation}": keys | more
    for ratio, keys in RATIOS.items()
    for aggregation, more in AGGREGATIONS.items()
    if not (ratio == "cispo" and more) and not ("gspo" in ratio and not more)
}
KLS = {
    f"{kind} {low} {high} {'engine' if engine else ''} {aggregation}": {
        "reference_policy_kl_penalty": 0.7,
        "reference_policy_kl_type": kind,
        "kl_input_clamp_value": low,
        "kl_output_clamp_value": high,
        "use_on_policy_kl_approximation": engine,
        **AGGREGATIONS[aggregation],
    }
    for kind in ("k1", "k2", "k3")
    for low, high in ((20.0, 10.0), (1.0, None), (None, 0.5), (0.8, 0.4), (None, None))
    for engine in (False, True)
    for aggregation in (("token-mean", "dr-grpo") if low == 0.8 else ("token-mean",))
}
TERMS = {
    "kl in the reward": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5},
    "entropy": PLAIN | {"entropy_coefficient": 0.3},
    "nll": PLAIN | {"positive_example_nll_weight": 0.4},
    "all": {"entropy_coefficient": -0.2, "positive_example_nll_weight": 0.4, "reference_policy_kl_penalty": 0.5},
}
NEMO_CORRECTIONS = {
    "is": truncated(None),
    "tis": truncated("tis", 1.2),
    "tis both ends": truncated("tis", 1.2, 0.8),
    "icepop": truncated("icepop", 1.3, 0.7),
    "seq-mask-tis": truncated("seq-mask-tis", 1.1, 0.9),
}
CORRECTED = {
    f"{name} {mode}": keys | RATIOS[mode] | more
    for name, keys in NEMO_CORRECTIONS.items()
    for mode, more in (("clip", {}), ("cispo", {}), ("on-policy", {}), ("gspo", AGGREGATIONS["seq-mean-token-mean"]))
    if not (name == "seq-mask-tis" and mode == "gspo")
}
ADAPTIVE = {
    f"adaptive clip {name}": truncated("tis", 1.1) | {"ratio_clip_adaptive": True} | more
    for name, more in {
        "token-mean": PLAIN,
        "narrow": RATIOS["narrow"],
        "dual": RATIOS["dual"],
        "both bounds": PLAIN | truncated("tis", 1.1, 0.9),
        "dr-grpo": PLAIN | AGGREGATIONS["dr-grpo"],
    }.items()
}
MASKED = {
    f"off-policy mask {name}": {"off_policy_mask_threshold": 0.05} | more
    for name, more in {
        **{mode: RATIOS[mode] for mode in ("clip", "reinforce", "on-policy", "cispo")},
        "gspo": GSPO,
        "seq-mean-token-mean": PLAIN | AGGREGATIONS["seq-mean-token-mean"],
        "all": TERMS["all"],
        "tis": PLAIN | truncated("tis", 1.2),
        "adaptive clip": ADAPTIVE["adaptive clip narrow"],
    }.items()
}
CONFIGS = {**MODES, **KLS, **TERMS, **CORRECTED, **ADAPTIVE, **MASKED}
A_FEW = [
    {},
    MODES["dual seq-mean-token-mean"],
    MODES["gspo dr-grpo"],
    MODES["cispo token-mean"],
    TERMS["all"] | truncated("tis", 1.2) | {"use_on_policy_kl_approximation": True},
    CORRECTED["icepop gspo"],
    CORRECTED["seq-mask-tis clip"],
    CORRECTED["is on-policy"],
    MASKED["off-policy mask adaptive clip"],
    MASKED["off-policy mask all"],
]
"""Configurations that together go through all branches."""
A_FEW_LOSSES = [*map(make_loss, A_FEW), NllLoss()]
CORRECTIONS = {
    "tis": CorrectionConfig(weight_max=1.2),
    "geometric": CorrectionConfig(weight="geometric", weight_max=1.1, weight_min=0.9),
    "sequence, normalized": CorrectionConfig(weight="sequence", weight_max=2.0, normalize=True),
    "rejection of tokens": CorrectionConfig(weight="none", weight_max=None, reject=(Rule("token_k3", 0.05),)),
    "chain": CorrectionConfig(
        weight_max=1.3, reject=(Rule("token_k1", 1.5, 0.6), Rule("seq_mean_k2", 0.2)), normalize=True
    ),
    "veto": CorrectionConfig(weight_max=2.0, reject=(Rule("seq_max_k1", 2.5, 0.4),)),
    "bypass": CorrectionConfig(weight="none", weight_max=None, bypass=True),
}


def evaluate(loss, curr: torch.Tensor, batch, counts=None) -> tuple[float, dict[str, float], torch.Tensor]:
    """(loss, metrics, dL/dcurr)."""
    curr = curr.clone().requires_grad_()
    call = partial(loss_of_columns, loss) if isinstance(loss, GrpoLoss | NllLoss) else loss
    value, metrics = call(curr, batch, *(counts or totals(batch)))
    value.backward()
    assert curr.grad is not None
    return value.item(), metrics, curr.grad


def samples_of(curr, batch, loss: GrpoLoss) -> list[reference.Sample]:
    """The batch as the reference reads it, with the weights that the loss's correction means."""
    samples = reference.read(curr, batch, force_on_policy=loss.cfg.force_on_policy_ratio, bypass=loss.correction.bypass)
    cfg = loss.correction
    rules = [(rule.statistic, rule.max, rule.min) for rule in cfg.reject]
    reference.correct(samples, cfg.weight, cfg.weight_min, cfg.weight_max, rules, cfg.normalize)
    return samples if cfg.denominator == "all" else reference.without_rejected(samples)


def dense(shape: torch.Size, derivatives: dict[tuple[int, int], float]) -> torch.Tensor:
    made = torch.zeros(shape, dtype=torch.float64)
    for place, value in derivatives.items():
        made[place] = value
    return made


def assert_equals_reference(loss: GrpoLoss, curr, batch, samples, rel: float = 1e-6) -> dict[str, float]:
    """Value, gradient, metrics."""
    counts = Totals.of(samples)
    value, metrics, gradient = evaluate(loss, curr, batch)
    wanted = reference.metrics(samples, loss.cfg, counts)
    assert value == pytest.approx(wanted["loss"], rel=rel, abs=rel * reference.magnitude(samples, loss.cfg, counts))
    wanted_gradient = dense(gradient.shape, reference.gradient(samples, loss.cfg, counts))
    smallest = rel * float(wanted_gradient.abs().max())  # sums over a sequence (GSPO) cancel
    torch.testing.assert_close(gradient.double(), wanted_gradient, rtol=rel, atol=smallest)
    assert (gradient[~inside(batch)[:, 1:]] == 0).all()
    del wanted["loss"]
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=rel, abs=rel)
    return metrics


# Values and gradients


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_value_gradient_and_metrics_equal_the_formula(keys):
    loss = make_loss(keys)
    for seed in range(4):
        curr, batch = make_batch(seed)
        assert_equals_reference(loss, curr, batch, samples_of(curr, batch, loss))


@pytest.mark.parametrize("keys", A_FEW)
def test_float32_logprobs_give_the_same_to_float32_precision(keys):
    loss = make_loss(keys)
    for seed in range(4, 8):
        curr, batch = make_batch(seed, dtype=torch.float32)
        assert_equals_reference(loss, curr, batch, samples_of(curr, batch, loss), rel=2e-5)


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("mode", ["clip token-mean", "gspo seq-mean-token-mean", "cispo token-mean", "all"])
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_a_corrected_batch_gives_the_formula_with_its_denominator(correction, mode, denominator):
    loss = make_loss(CONFIGS[mode], replace(correction, denominator=denominator))
    for seed in range(4):
        curr, batch = make_batch(seed)
        samples = samples_of(curr, batch, loss)
        batch, _ = correct_columns(batch, loss.correction)
        counts = Totals.of(samples)
        assert totals(batch) == (counts.sequences, counts.tokens)
        assert_equals_reference(loss, curr, batch, samples)


@pytest.mark.parametrize("keys", [{}, TERMS["all"]], ids=["no weights", "all terms"])
@pytest.mark.parametrize("name", [name for name, cfg in CORRECTIONS.items() if not cfg.normalize])
def test_weights_that_the_batch_brings_are_those_that_the_loss_makes(name, keys):
    loss = make_loss(keys, replace(CORRECTIONS[name], max_nonfinite_fraction=0.5))
    for seed in range(4):
        curr, batch = make_batch(seed)
        batch["generation_logprobs"][tuple(inside(batch).nonzero()[seed])] = -math.inf
        own, brought = evaluate(loss, curr, batch), evaluate(loss, curr, correct_columns(batch, loss.correction)[0])
        assert brought[:2] == own[:2]
        assert torch.equal(brought[2], own[2])


def test_weights_of_the_batch_are_taken_as_they_are():
    loss = make_loss(PLAIN, {"preset": "is"})
    curr, batch = make_batch(1)
    samples = samples_of(curr, batch, loss)
    batch["importance_weights"] = torch.where(inside(batch), 0.0, math.nan).float()
    for sample in samples:
        for i, token in enumerate(sample.tokens):
            token.weight, token.kept = [0.25, 0.0, 3.0][i % 3], i % 3 != 1
            batch["importance_weights"][sample.row, token.position + 1] = token.weight
    metrics = assert_equals_reference(loss, curr, batch, samples)
    weights = [token.weight for sample in samples for token in sample.tokens]
    assert metrics["sampling_importance_ratio"] == pytest.approx(sum(weights) / len(weights))


def test_unfiltered_logprobs_carry_the_kl_and_its_gradient():
    loss = make_loss({"reference_policy_kl_penalty": 0.5, "positive_example_nll_weight": 0.1})
    curr, batch = make_batch(2)
    free = torch.where(inside(batch)[:, 1:], curr - 0.125, math.nan)
    samples = samples_of(curr, {**batch, "curr_logprobs_unfiltered": free}, loss)
    batch["curr_logprobs_unfiltered"] = free.requires_grad_()
    assert_equals_reference(loss, curr, batch, samples)
    wanted = dense(free.shape, reference.gradient(samples, loss.cfg, Totals.of(samples), "unfiltered"))
    torch.testing.assert_close(free.grad, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["generation_logprobs", "prev_logprobs"])
@pytest.mark.parametrize("keys", A_FEW)
def test_a_token_without_a_finite_logprob_takes_part_in_nothing_and_is_counted(keys, field, bad):
    loss = make_loss(keys)
    for seed in range(3):
        curr, batch = make_batch(seed)
        places = inside(batch).nonzero()[::4]
        for row, position in places:
            batch[field][row, position] = bad
        metrics = assert_equals_reference(loss, curr, batch, samples_of(curr, batch, loss))
        if field == "generation_logprobs" or not loss.cfg.force_on_policy_ratio:
            assert metrics["nonfinite_logprob_ratio"] == pytest.approx(len(places) / int(inside(batch).sum()))


def test_the_batches_reach_every_branch():
    reached: dict[str, set[bool]] = {}
    for seed in range(4):
        curr, batch = make_batch(seed)
        for name in ("clip token-mean", "dual token-mean", "gspo seq-mean-token-mean", "gspo dual seq-mean-token-mean"):
            loss = make_loss(MODES[name])
            samples = samples_of(curr, batch, loss)
            flat = dense(curr.shape, reference.gradient(samples, loss.cfg, Totals.of(samples)))
            reached.setdefault(name, set()).update((flat[inside(batch)[:, 1:]] == 0).tolist())
            reached.setdefault("positive", set()).update(sample.positive for sample in samples)
        loss = make_loss(CONFIGS["off-policy mask adaptive clip"])
        for sample in samples_of(curr, batch, loss):
            reached.setdefault("off-policy mask", set()).add(reference.off_policy(sample, loss.cfg))
            for token, ratio in zip(sample.tokens, reference.ratios(sample, loss.cfg), strict=True):
                widened = reference.upper_clip(token, loss.cfg)
                reached.setdefault("wider clip", set()).add(1 + loss.cfg.ratio_clip_max < ratio < widened)
        for token in (token for sample in samples for token in sample.tokens):
            x = token.ref - token.curr
            reached.setdefault("KL input clamped", set()).add(abs(x) > 0.8)
            reached.setdefault("KL output clamped", set()).add(math.exp(x) - 1 - x > 0.5)
            reached.setdefault("sign of the advantage", set()).add(token.advantage < 0)
        reached.setdefault("sample dropped", set()).update((batch["sample_mask"] == 0).tolist())
        reached.setdefault("row without tokens", set()).update((batch["token_mask"].sum(-1) == 0).tolist())
    assert reached == {name: {True, False} for name in reached}


# By hand


def one_token(curr: float, prev: float, gen: float, advantage: float = 1.0) -> tuple[torch.Tensor, dict]:
    """A row of a prompt token and a generated one, with probabilities."""
    batch = {"token_mask": torch.tensor([[0.0, 1.0]]), "sample_mask": torch.ones(1), "rewards": torch.ones(1)}
    for name, value in (("prev_logprobs", prev), ("generation_logprobs", gen)):
        batch[name] = torch.tensor([[math.nan, math.log(value)]])
    batch["advantages"] = torch.tensor([[math.nan, advantage]])
    return torch.tensor([[math.log(curr)]]), batch


def test_ratio_is_current_over_previous_and_weight_trainer_over_engine():
    curr, batch = one_token(curr=0.44, prev=0.4, gen=0.2)
    value, metrics, gradient = evaluate(make_loss(PLAIN | truncated(None)), curr, batch)
    assert metrics["probs_ratio"] == pytest.approx(1.1)
    assert metrics["sampling_importance_ratio"] == pytest.approx(2.0)
    assert (value, gradient.item()) == (pytest.approx(-2.2), pytest.approx(-2.2))


@pytest.mark.parametrize("curr", [0.44, 0.36])
def test_extremes_of_the_ratio_are_of_tokens_in_the_mask(curr):
    """Padding would add a ratio of 1."""
    logprobs, batch = one_token(curr=curr, prev=0.4, gen=0.4)
    batch |= {name: torch.nn.functional.pad(f, (0, 1)) for name, f in batch.items() if f.dim() == 2}
    metrics = evaluate(make_loss(PLAIN), torch.nn.functional.pad(logprobs, (0, 1)), batch)[1]
    for name in ("probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max"):
        assert metrics[name] == pytest.approx(curr / 0.4)


def test_tis_cuts_the_weight_of_a_token_that_the_trainer_likes_more_and_not_of_the_other():
    loss = make_loss(PLAIN | truncated("tis", 1.5))
    curr, batch = one_token(curr=0.4, prev=0.4, gen=0.2)
    assert evaluate(loss, curr, batch)[0] == pytest.approx(-1.5)
    curr, batch = one_token(curr=0.2, prev=0.2, gen=0.4)
    assert evaluate(loss, curr, batch)[0] == pytest.approx(-0.5)


@pytest.mark.parametrize(("engine", "bound"), [(0.2, 1.2 / 0.75), (0.3, 1.2), (0.4, 1.2), (0.8, 1.2)])
def test_qurls_clip_widens_where_the_weight_is_truncated(engine, bound):
    """At rho = 0.4 / 0.2 and C = 1.5, 0.75 of the weight is left, and the ratio may rise to 1.2 / 0.75."""
    loss = make_loss(PLAIN | truncated("tis", 1.5) | {"ratio_clip_adaptive": True})
    weight = min(0.4 / engine, 1.5)
    for ratio in (bound - 0.01, bound + 0.01):
        curr, batch = one_token(curr=0.4 * ratio, prev=0.4, gen=engine)
        value, metrics, gradient = evaluate(loss, curr, batch)
        assert value == pytest.approx(-weight * min(ratio, bound))
        assert metrics["probs_ratio_clamped"] == pytest.approx(min(ratio, bound))
        assert (gradient.item() == 0) == (ratio > bound)


@pytest.mark.parametrize(
    ("advantage", "engine", "masked"), [(-1.0, 0.41, True), (-1.0, 0.39, False), (1.0, 0.8, False), (-1.0, 0.1, False)]
)
def test_a_sequence_of_negative_advantage_that_the_policy_left_has_no_policy_loss(advantage, engine, masked):
    """The threshold is log 2; the engine gave the token 0.41, twice what the policy gives it now, or less."""
    loss = make_loss({"off_policy_mask_threshold": math.log(2), "reference_policy_kl_penalty": 0.5})
    curr, batch = one_token(curr=0.2, prev=0.2, gen=engine, advantage=advantage)
    batch["reference_policy_logprobs"] = torch.tensor([[math.nan, math.log(0.4)]])
    value, metrics, gradient = evaluate(loss, curr, batch)
    assert metrics["off_policy_masked_ratio"] == masked
    assert value == pytest.approx(0.5 * (1 - math.log(2)) - (0.0 if masked else advantage))
    assert gradient.item() != 0  # of the KL, which is not masked


def test_the_mask_decides_of_a_whole_sequence_by_its_mean_advantage():
    loss = make_loss(PLAIN | {"off_policy_mask_threshold": 0.1})
    for advantages, masked in (((-0.5, 0.25, -0.25), True), ((-0.5, 0.75, -0.125), False)):
        batch = {"token_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0]]), "sample_mask": torch.ones(1)}
        batch |= {"rewards": torch.ones(1), "advantages": torch.tensor([[0.0, *advantages]])}
        batch |= {"prev_logprobs": torch.full((1, 4), -2.0), "generation_logprobs": torch.full((1, 4), -1.0)}
        _, metrics, gradient = evaluate(loss, torch.full((1, 3), -2.0), batch)
        assert metrics["off_policy_masked_ratio"] == masked
        assert bool(gradient.any()) != masked


UNUSED_MASK = {"off_policy_mask_threshold": 1e6}


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        *((keys, UNUSED_MASK) for keys in (PLAIN, TERMS["all"], GSPO)),
        (PLAIN | truncated("tis", 1e6), UNUSED_MASK | {"ratio_clip_adaptive": True}),
    ],
)
def test_a_threshold_that_nothing_exceeds_and_a_bound_that_truncates_nothing_change_no_bit(keys, more):
    curr, batch = make_batch(5)
    value, metrics, gradient = evaluate(make_loss(keys), curr, batch)
    same, same_metrics, same_gradient = evaluate(make_loss(keys | more), curr, batch)
    assert same == value and torch.equal(same_gradient, gradient)
    assert same_metrics == metrics | {"off_policy_masked_ratio": 0.0}


def test_bypass_takes_the_ratio_to_the_engine():
    curr, batch = one_token(curr=0.44, prev=math.nan, gen=0.4)
    value, metrics, _ = evaluate(make_loss(PLAIN, {"preset": "bypass"}), curr, batch)
    assert (metrics["probs_ratio"], value) == (pytest.approx(1.1), pytest.approx(-1.1))


@pytest.mark.parametrize(("advantage", "flat"), [(1.0, True), (-1.0, False)])
def test_the_clip_stops_a_rise_that_pays_and_not_one_that_costs(advantage, flat):
    curr, batch = one_token(curr=0.6, prev=0.4, gen=0.4, advantage=advantage)
    value, _, gradient = evaluate(make_loss(PLAIN), curr, batch)
    assert (gradient.item() == 0) == flat
    assert value == pytest.approx(-1.2 if flat else 1.5)


def test_the_estimates_of_the_kl_are_of_the_policy_from_its_reference():
    """x = ref - curr = log 2: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x."""
    x = math.log(2)
    for kind, value in (("k1", -x), ("k2", x**2 / 2), ("k3", 1 - x)):
        curr, batch = one_token(curr=0.2, prev=0.2, gen=0.2)
        batch["reference_policy_logprobs"] = torch.tensor([[math.nan, math.log(0.4)]])
        loss = make_loss({"reference_policy_kl_type": kind, "reference_policy_kl_penalty": 0.5})
        _, metrics, _ = evaluate(loss, curr, batch)
        assert metrics["kl_penalty"] == pytest.approx(value)
        assert metrics["loss"] == pytest.approx(-1 + 0.5 * value)


# Metrics


@pytest.mark.parametrize("keys", [*CORRECTED.values(), PLAIN, GSPO], ids=[*CORRECTED, "plain", "gspo"])
def test_metrics_of_the_correction_are_nemo_rls(keys):
    """Means of the weights as they are used (of the bare ratios without a correction), and the share out of bounds.

    Of sequences where NeMo RL counts sequences. Its mean weight of sequences is multiplied by their number, by a
    broadcast of [B, 1] with [B]; that is not followed.
    """
    loss = make_loss(keys)
    by_sequence, masked = loss.cfg.sequence_level_importance_ratios, "seq-mask" in str(keys)
    assert loss.metric_normalizations["sampling_importance_ratio"] == ("sequences" if by_sequence else "tokens")
    assert loss.metric_normalizations["is_oob_ratio"] == ("sequences" if masked else "tokens")
    for seed in range(4):
        curr, batch = make_batch(seed)
        samples = samples_of(curr, batch, loss)
        if not loss.cfg.use_importance_sampling_correction:
            reference.correct(samples, "sequence" if by_sequence else "token")
        metrics = loss_of_columns(loss, curr, batch, *totals(batch))[1]

        def mean(values, over_sequences: bool, samples=samples) -> float:
            if over_sequences:
                return sum(values(sample.tokens[0]) for sample in samples) / len(samples)
            return sum(values(t) for s in samples for t in s.tokens) / sum(len(s.tokens) for s in samples)

        assert metrics["sampling_importance_ratio"] == pytest.approx(mean(lambda t: t.weight, by_sequence), rel=1e-6)
        assert metrics["is_oob_ratio"] == pytest.approx(mean(lambda t: t.outside, masked))
        assert metrics["num_valid_samples"] == batch["sample_mask"].sum()


@pytest.mark.parametrize("keys", A_FEW)
def test_every_metric_says_what_it_was_divided_by(keys):
    """Counts that are not those of the batch, such as a trainer's placeholder of 1, can be undone by name."""
    loss = make_loss(keys)
    curr, batch = make_batch(3)
    sequences, tokens = totals(batch)
    metrics = loss_of_columns(loss, curr, batch, sequences, tokens)[1]
    bare = loss_of_columns(loss, curr, batch, torch.ones(()), torch.ones(()))[1]
    assert set(metrics) == set(loss.metric_normalizations)
    divisor = {"tokens": tokens, "sequences": sequences, "none": 1.0}
    compound = {"loss"} if loss.cfg.entropy_coefficient or loss.cfg.positive_example_nll_weight else set()
    for name in set(metrics) - compound:
        by = float(divisor[loss.metric_normalizations[name]])
        assert bare[name] / by == pytest.approx(metrics[name], rel=1e-6, abs=1e-12)


# Parts, order, padding


def split_metrics(loss, curr, batch, parts) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics combined over parts [(start, batch)], and their gradients side by side."""
    counts, made, gradients = totals(batch), [], []
    for start, part in parts:
        width, size = part["input_ids"].size(1) - 1, part["input_ids"].size(0)
        _, metrics, gradient = evaluate(loss, curr[start : start + size, :width], part, counts)
        made.append(metrics)
        gradients.append(torch.nn.functional.pad(gradient, (0, curr.size(1) - width)))
    return combine_metrics(made), torch.cat(gradients)


def ready(loss, batch):
    """The batch as a trainer gives it out: with the count of positive tokens, corrected where the loss is."""
    positive = (inside(batch)[:, 1:] & (batch["rewards"] > 0)[:, None]).sum()
    batch["positive_toks"] = positive
    if isinstance(loss, GrpoLoss) and loss.correction.weight != "none":
        batch, _ = correct_columns(batch, loss.correction)
    return batch


seeds = st.integers(0, 2**31)
losses = st.sampled_from(A_FEW_LOSSES)
quick = settings(deadline=None, max_examples=100)


@quick
@given(seeds, losses, st.lists(st.integers(1, 7), unique=True, max_size=4), st.booleans())
def test_microbatches_add_up_to_the_whole(seed, loss, cuts, corrected):
    curr, batch = make_batch(seed)
    batch = ready(loss if corrected else None, batch)
    edges = [0, *sorted(cuts), 8]
    whole, count = stage_of(batch), {"positive_toks": batch["positive_toks"]}
    parts = [(a, columns_of(whole.take_trimmed_rows(slice(a, b))) | count) for a, b in pairwise(edges)]
    value, metrics, gradient = evaluate(loss, curr, batch)
    made, gradients = split_metrics(loss, curr, batch, parts)
    assert made == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    assert made["loss"] == pytest.approx(value, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(gradients, gradient, rtol=1e-6, atol=1e-12)


@quick
@given(seeds, losses, st.integers(1, 10))
def test_ranks_add_up_to_the_whole(seed, loss, ranks):
    curr, batch = make_batch(seed)
    batch = ready(loss, batch)
    whole, parts, start = evaluate(loss, curr, batch), [], 0
    for part in split_shards(stage_of(batch), ranks):
        if part.num_rows:
            parts.append((start, columns_of(part) | {"positive_toks": batch["positive_toks"]}))
        start += part.num_rows
    made, gradients = split_metrics(loss, curr, batch, parts)
    assert made == pytest.approx(whole[1], rel=1e-6, abs=1e-7)
    torch.testing.assert_close(gradients, whole[2], rtol=1e-6, atol=1e-12)


@quick
@given(seeds, losses, st.permutations(range(8)))
def test_the_order_of_samples_does_not_matter(seed, loss, order):
    curr, batch = make_batch(seed)
    value, metrics, gradient = evaluate(loss, curr, batch)
    other = evaluate(loss, curr[order], {name: field[order] for name, field in batch.items()})
    assert other[0] == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert other[1] == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(other[2], gradient[order], rtol=1e-6, atol=1e-12)


@quick
@given(seeds, losses, st.integers(0, 9), st.sampled_from(GARBAGE), st.booleans())
def test_padding_is_never_read(seed, loss, more, junk, corrected):
    """Garbage of any kind, and any amount of it, in every tensor: not a bit of loss, metrics or gradient changes."""
    (curr, clean), (dirty_curr, dirty) = make_batch(seed, garbage=(0.0,)), make_batch(seed, garbage=(junk, 3.0))
    for name in ("rewards", *reference.PER_TOKEN):
        assert not torch.equal(clean[name], dirty[name])
    if corrected:
        clean, dirty = ready(loss, clean), ready(loss, dirty)
        for name in ("importance_weights", "out_of_bounds"):
            if name in dirty:
                dirty[name][~inside(dirty)] = junk if dirty[name].is_floating_point() else True
    wider = {n: pad(f, more, 0 if n == "token_mask" else junk) if f.dim() == 2 else f for n, f in dirty.items()}
    wider["input_ids"] = torch.zeros(wider["token_mask"].shape, dtype=torch.int64)
    value, metrics, gradient = evaluate(loss, curr, clean)
    same, same_metrics, same_gradient = evaluate(loss, dirty_curr, dirty)
    assert (same, same_metrics) == (value, metrics)
    assert torch.equal(same_gradient, gradient)
    other, other_metrics, other_gradient = evaluate(loss, pad(dirty_curr, more, junk), wider)
    assert other == pytest.approx(value, rel=1e-6, abs=1e-7)
    assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(other_gradient[:, : gradient.size(1)], gradient, rtol=1e-6, atol=1e-12)
    assert (other_gradient[:, gradient.size(1) :] == 0).all()
    assert (gradient[~inside(clean)[:, 1:]] == 0).all()


def pad(field: torch.Tensor, more: int, value: float) -> torch.Tensor:
    if field.dtype is torch.bool:
        return torch.nn.functional.pad(field, (0, more), value=True)
    return torch.nn.functional.pad(field.double(), (0, more), value=value)


@pytest.mark.parametrize("loss", A_FEW_LOSSES)
def test_a_dropped_sample_counts_as_if_it_were_not_there(loss):
    curr, batch = make_batch(3)
    left = (batch["sample_mask"] > 0).nonzero()[:, 0]
    assert len(left) < len(curr)
    value, metrics, gradient = evaluate(loss, curr, batch)
    other = evaluate(loss, curr[left], {name: field[left] for name, field in batch.items()})
    assert (value, metrics) == (pytest.approx(other[0], rel=1e-6), pytest.approx(other[1], rel=1e-6))
    torch.testing.assert_close(gradient[left], other[2], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("loss", A_FEW_LOSSES)
def test_a_microbatch_without_a_token_adds_nothing(loss):
    curr, batch = make_batch(4)
    batch["sample_mask"] = torch.zeros_like(batch["sample_mask"])
    counts = torch.tensor(3.0), torch.tensor(20.0)
    value, metrics, gradient = evaluate(loss, curr, batch, counts)
    assert value == 0 and not gradient.any()
    whole = evaluate(loss, *make_batch(5))[1]
    assert combine_metrics([whole, metrics]) == whole == combine_metrics([metrics, whole])


@pytest.mark.parametrize("keys", [PLAIN, MODES["gspo seq-mean-token-mean"], TERMS["nll"]])
def test_a_batch_whose_tokens_are_all_rejected_gives_no_gradient_of_the_policy(keys):
    curr, batch = make_batch(6)
    for denominator in ("all", "kept"):
        loss = make_loss(keys, CorrectionConfig(reject=(Rule("token_k1", 1e-9),), denominator=denominator))
        rejected, metrics = correct_columns(batch, loss.correction)
        assert metrics["correction/kept_tokens"] == 0
        value, metrics, gradient = evaluate(loss, curr, rejected)
        nll = loss.cfg.positive_example_nll_weight * metrics["positive_nll_loss"]
        assert value == pytest.approx(nll) and metrics["sampling_importance_ratio"] == 0
        assert gradient.any() == (nll != 0)  # of rejected tokens only the correction's part goes, if they are counted
        assert (nll != 0) == (keys is TERMS["nll"] and denominator == "all")


# Limits


@quick
@given(seeds, st.sampled_from(list(MODES.values())), st.sampled_from(list(CORRECTIONS.values())))
def test_policies_that_agree_need_no_correction(seed, keys, correction):
    curr, batch = make_batch(seed)
    batch["generation_logprobs"] = batch["prev_logprobs"].clone()
    if keys.get("force_on_policy_ratio") or (keys.get("disable_ppo_ratio") and correction.bypass):
        correction = CorrectionConfig(weight="none", weight_max=None)
    plain = evaluate(make_loss(keys), curr, batch)
    loss = make_loss(keys, correction)
    corrected = evaluate(loss, curr, correct_columns(batch, loss.correction)[0])
    assert corrected[0] == plain[0] and torch.equal(corrected[2], plain[2])


@quick
@given(seeds, st.sampled_from(["tis", "icepop", "seq-mask-tis"]))
def test_bounds_that_nothing_reaches_are_no_truncation(seed, kind):
    curr, batch = make_batch(seed)
    bounded = evaluate(make_loss(truncated(kind, 1e9, 0.0)), curr, batch)
    free = evaluate(make_loss(truncated(None)), curr, batch)
    assert bounded[:2] == free[:2] and torch.equal(bounded[2], free[2])


@quick
@given(seeds)
def test_wide_clips_are_no_clips(seed):
    curr, batch = make_batch(seed)
    wide = PLAIN | {"ratio_clip_min": 1.0, "ratio_clip_max": 1e9, "ratio_clip_c": 1e9}
    _, metrics, gradient = evaluate(make_loss(wide), curr, batch)
    mask, total = inside(batch)[:, 1:], totals(batch)[1]
    ratio = (curr - batch["prev_logprobs"][:, 1:]).exp()
    plain = torch.where(mask, -batch["advantages"][:, 1:] * ratio, 0.0) / total  # = -A r, and d(A r) = A r
    torch.testing.assert_close(gradient, plain, rtol=1e-9, atol=0)
    assert metrics["probs_ratio"] == metrics["probs_ratio_clamped"]


def test_at_the_policy_that_was_sampled_all_ratios_give_the_same_gradient():
    """curr = prev: clip, dual clip, CISPO, REINFORCE and a forced ratio are all the plain policy gradient."""
    curr, batch = make_batch(7)
    curr = batch["prev_logprobs"][:, 1:].clone()
    plain = torch.where(inside(batch)[:, 1:], -batch["advantages"][:, 1:], 0.0) / totals(batch)[1]
    for name in ("clip", "dual", "reinforce", "on-policy", "cispo"):
        torch.testing.assert_close(evaluate(make_loss(RATIOS[name]), curr, batch)[2], plain, rtol=1e-12, atol=0)


def test_ratios_beyond_float32_do_not_reach_the_gradient_through_terms_that_are_off():
    """A trainer that gives e^99 times the engine's probability: the entropy's weight overflows, its factor is 0."""
    curr, batch = one_token(curr=0.5, prev=0.5, gen=0.5)
    batch["generation_logprobs"][0, 1] = -100.0
    value, _, gradient = evaluate(make_loss(PLAIN | truncated("tis", 2.0)), curr.float(), batch)
    assert (value, gradient.item()) == (pytest.approx(-2.0), pytest.approx(-2.0))


def test_a_ratio_beyond_float32_is_clipped_without_a_nan():
    curr, batch = one_token(curr=0.5, prev=0.5, gen=0.5)
    batch["prev_logprobs"][0, 1] = batch["generation_logprobs"][0, 1] = -100.0
    value, _, gradient = evaluate(make_loss(PLAIN | {"entropy_coefficient": 0.0}), curr.float(), batch)
    assert (value, gradient.item()) == (pytest.approx(-1.2), 0.0)


# The entropy bonus


def entropy_alone(curr, batch, correction) -> torch.Tensor:
    """dL/dcurr of the bonus, of coefficient 1: by what the gradient differs from that without it."""
    batch, _ = correct_columns(batch, make_loss(PLAIN, correction).correction)
    keys = (PLAIN | {"entropy_coefficient": coefficient} for coefficient in (1.0, 0.0))
    with_it, without = (evaluate(make_loss(each, correction), curr, batch)[2] for each in keys)
    return with_it - without


@pytest.mark.parametrize(
    "correction",
    [{"preset": "icepop"}, {"weight": "none", "weight_max": None, "reject": [Rule("seq_mean_k3", 1.0)]}],
    ids=["a token", "a sequence"],
)
def test_what_a_rule_rejects_has_no_part_in_the_entropy_bonus(correction):
    curr, batch = make_batch(3)
    (row, *_), (first, *_) = inside(batch)[:, 1:].nonzero().unbind(-1)
    batch["generation_logprobs"][row, first + 1] -= 6.0  # e^6 times as much weight, if it had any
    gradient = entropy_alone(curr, batch, correction)
    assert gradient[row, first] == 0
    assert gradient.any()


def test_the_entropy_bonus_of_a_token_has_the_bound_of_its_weight():
    """-H = w r log pi with r = 1, so the gradient is w (1 + log pi), and w at most 2."""
    curr, batch = one_token(curr=0.5, prev=0.5, gen=0.001)
    assert entropy_alone(curr, batch, {"preset": "tis"}).item() == pytest.approx(2 * (1 + math.log(0.5)))


@pytest.mark.parametrize("preset", ["is", "none"])
def test_the_entropy_bonus_has_the_gradient_of_the_entropy(preset):
    """Over all tokens of a policy, each as often as the engine samples it; the policy has moved since the rollout."""
    torch.manual_seed(0)
    logits = torch.randn(12, dtype=torch.float64)
    gen, prev = ((logits + size * torch.randn(12, dtype=torch.float64)).log_softmax(-1) for size in (0.5, 0.3))
    logits.requires_grad_()
    curr = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((curr.exp() * curr).sum(), logits, retain_graph=True)
    mask = torch.ones(1, 13).index_fill(1, torch.tensor([0]), 0.0)
    batch = {"token_mask": mask, "sample_mask": torch.ones(1), "advantages": torch.zeros(1, 13)}
    for name, logprobs in (("generation_logprobs", gen), ("prev_logprobs", prev)):
        batch[name] = torch.nn.functional.pad(logprobs, (1, 0))[None]
    of_tokens = 12 * entropy_alone(curr.detach()[None], batch, {"preset": preset})[0]
    (given,) = torch.autograd.grad((gen.exp() * of_tokens * curr).sum(), logits)
    torch.testing.assert_close(given, exact, rtol=1e-5, atol=1e-7)


def test_without_a_correction_the_entropy_bonus_is_the_metric():
    curr, batch = make_batch(3)
    value, metrics, _ = evaluate(make_loss(PLAIN | {"entropy_coefficient": 1.0}), curr, batch)
    assert value == pytest.approx(evaluate(make_loss(PLAIN), curr, batch)[0] - metrics["approx_entropy"], rel=1e-12)


# The object


@pytest.mark.parametrize("loss", A_FEW_LOSSES)
def test_a_loss_is_pure(loss):
    curr, batch = make_batch(5)
    before, settings_before = {name: field.clone() for name, field in batch.items()}, repr(vars(loss))
    first, again = evaluate(loss, curr, batch), evaluate(loss, curr, batch)
    assert first[:2] == again[:2] and torch.equal(first[2], again[2])
    assert repr(vars(loss)) == settings_before
    assert all(torch.equal(batch[name].nan_to_num(7.0), before[name].nan_to_num(7.0)) for name in before)
    assert set(batch) == set(before)


def test_a_kl_without_a_reference_policy_is_refused():
    curr, batch = make_batch(0)
    del batch["reference_policy_logprobs"]
    with pytest.raises(ValueError, match=r"reference_policy_kl_penalty=0\.01 needs reference_policy_logprobs .* 0 "):
        loss_of_columns(make_loss({}), curr, batch, *totals(batch))
    for keys in (PLAIN, {"use_kl_in_reward": True}):
        assert math.isfinite(evaluate(make_loss(keys), curr, batch)[0])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_in_a_reward_only_k1_has_the_gradient_of_the_kl(kind):
    """Why `config.validate` refuses the others beside use_kl_in_reward (arXiv 2510.01555). A KL in the reward is a
    number that weighs grad log pi; here over all tokens of a policy, so without noise, at a KL of 0.01.
    """
    torch.manual_seed(0)
    logits = torch.randn(20, dtype=torch.float64)
    reference = logits.log_softmax(-1)
    logits = (logits + 0.2 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    cfg = LossConfig(reference_policy_kl_type=kind)
    k = kl_estimate(logprobs.detach(), reference, torch.ones(()), cfg)
    (given,) = torch.autograd.grad((logprobs.exp().detach() * k * logprobs).sum(), logits)
    if kind == "k1":
        assert torch.allclose(given, exact, rtol=0, atol=1e-12)
    else:
        assert abs(given @ exact / (exact @ exact)) < 0.1, "as much of it as lies along the KL's gradient"


@pytest.mark.parametrize(
    ("keys", "key"), [({"normalize": True}, "normalize=true"), ({"denominator": "kept"}, "denominator=kept")]
)
def test_a_correction_that_needs_the_whole_batch_is_not_made_of_a_part(keys, key):
    curr, batch = make_batch(0)
    with pytest.raises(ValueError, match=rf"{key} needs .*\.correct_batch"):
        loss_of_columns(make_loss(PLAIN, keys), curr, batch, *totals(batch))


def test_without_rewards_there_are_no_positive_examples():
    curr, batch = make_batch(0)
    del batch["rewards"]
    assert loss_of_columns(make_loss(TERMS["nll"]), curr, batch, *totals(batch))[1]["positive_nll_loss"] == 0


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("next_token_logprobs", lambda curr: curr[:, :-1]),
        ("next_token_logprobs", lambda curr: curr[:, :1]),
        ("next_token_logprobs", lambda curr: curr[:1]),
        ("next_token_logprobs", lambda curr: torch.nn.functional.pad(curr, (0, 1))),
        ("next_token_logprobs", lambda curr: curr[0]),
        ("advantages", lambda field: field[:, 0]),
        ("advantages", lambda field: field[:, :2]),
        ("advantages", lambda field: field[:1]),
        ("prev_logprobs", lambda field: field[:1]),
        ("prev_logprobs", lambda field: field[:, :2]),
        ("generation_logprobs", lambda field: field[:, :2]),
        ("reference_policy_logprobs", lambda field: field[:1]),
        ("importance_weights", lambda field: field[:, :2]),
        ("out_of_bounds", lambda field: field[:, :2]),
        ("out_of_bounds", lambda field: field.float()),
        ("sample_mask", lambda field: field[:, None]),
        ("sample_mask", lambda field: field[:1]),
        ("prev_logprobs", lambda field: field.long()),
        ("next_token_logprobs", lambda curr: curr.long()),
    ],
)
def test_a_tensor_of_a_wrong_shape_or_dtype_is_named(field, wrong):
    """Most of these would broadcast in silence."""
    curr, batch = make_batch(0, garbage=(0.0,))
    batch["importance_weights"], batch["out_of_bounds"] = inside(batch).float(), inside(batch)
    if field == "next_token_logprobs":
        curr = wrong(curr)
    else:
        batch[field] = wrong(batch[field])
    counts = torch.tensor(3.0), torch.tensor(20.0)
    with pytest.raises(ValueError, match=field):
        loss_of_columns(make_loss({}), curr, batch, *counts)


def test_importance_sampling_keys_and_a_correction_are_not_given_twice():
    with pytest.raises(UserError, match="give one of the two"):
        make_loss(truncated("tis", 2.0), {"preset": "tis"})


def test_extrema_are_not_summed():
    parts = [{"a": 1.0, "r_min": 2.0, "r_max": 2.0}, {"a": 2.0, "r_min": 1.0, "r_max": 1.0}, {"b": 5.0}]
    assert combine_metrics(parts) == {"a": 3.0, "r_min": 1.0, "r_max": 2.0, "b": 5.0}
    assert combine_metrics([]) == {}


def test_nll_is_the_mean_over_generated_tokens():
    curr, batch = make_batch(7)
    mask = inside(batch)[:, 1:]
    value, metrics, gradient = evaluate(NllLoss(), curr, batch)
    assert value == metrics["loss"] == pytest.approx(-curr[mask].mean().item(), rel=1e-12)
    torch.testing.assert_close(gradient, -mask.double() / mask.sum(), rtol=1e-12, atol=0)


# NeMo RL itself


def nemo_rl() -> SimpleNamespace:
    """Its loss, without its package's other imports: the definitions alone are executed."""
    root = os.environ.get("NEMO_RL_SRC")
    if not root or not Path(root, "nemo_rl/algorithms/loss/loss_functions.py").is_file():
        pytest.skip("NEMO_RL_SRC names no checkout of NeMo RL")
    from pydantic import BaseModel

    scope: dict[str, Any] = {
        "torch": torch, "Tensor": torch.Tensor, "BaseModel": BaseModel, "Optional": Optional, "Any": Any,
        "LossFunction": object, "BatchedDataDict": dict, "ClippedPGLossDataDict": dict,
        "LossInputType": SimpleNamespace(LOGPROB="logprob"),
        "LossType": SimpleNamespace(TOKEN_LEVEL="token_level", SEQUENCE_LEVEL="sequence_level"),
        "MetricNormalizer": SimpleNamespace(TOKENS="tokens", SEQUENCES="sequences", NONE="none"),
    }  # fmt: skip
    for path, names in (
        ("utils.py", {"calculate_kl", "masked_mean"}),
        ("loss/loss_functions.py", {"ClippedPGLossConfig", "ClippedPGLossFn"}),
    ):
        body = ast.parse(Path(root, "nemo_rl/algorithms", path).read_text()).body
        chosen = [node for node in body if getattr(node, "name", None) in names]
        exec(compile(ast.Module(chosen, []), path, "exec"), scope)
    return SimpleNamespace(**scope)


KNOWN_DIFFERENCES = {
    "gen_kl_error": "k3 here whatever reference_policy_kl_type is",
    "policy_kl_error": "the same",
    "sampling_importance_ratio": "of sequences: theirs is multiplied by the number of sequences",
}


@pytest.mark.nemo_rl
def test_nemo_rls_own_defaults_are_ours():
    defaults = nemo_rl().ClippedPGLossConfig().model_dump()
    assert {name: value for name, value in asdict(LossConfig()).items() if name in defaults} == defaults


OURS_ALONE = (
    *("loss_agg_mode", "loss_scale_factor", "entropy_coefficient"),
    *("ratio_clip_adaptive", "off_policy_mask_threshold"),
)


@pytest.mark.nemo_rl
def test_nemo_rls_own_loss_gives_the_same():
    theirs = nemo_rl()
    for name, keys in CONFIGS.items():
        if not set(OURS_ALONE) & set(keys):
            compare(make_loss(keys), theirs.ClippedPGLossFn(theirs.ClippedPGLossConfig(**keys)), name)


def compare(loss: GrpoLoss, other: Any, name: str) -> None:
    differs = set() if loss.cfg.reference_policy_kl_type == "k3" else {"gen_kl_error", "policy_kl_error"}
    differs |= {"sampling_importance_ratio"} if loss.cfg.sequence_level_importance_ratios else set()
    assert differs <= set(KNOWN_DIFFERENCES)
    normalizations = getattr(other, "metric_normalizations", {})  # v0.7.0 has none
    assert {n: loss.metric_normalizations[n] for n in normalizations} == normalizations, name
    for seed in range(4):
        curr, batch = make_batch(seed, garbage=(0.0,))  # it multiplies padding by 0
        value, metrics, gradient = evaluate(loss, curr, batch)
        other_value, other_metrics, other_gradient = evaluate(other, curr, batch)
        assert value == pytest.approx(other_value, rel=1e-6, abs=1e-7), name
        torch.testing.assert_close(gradient, other_gradient, rtol=1e-6, atol=1e-6 * float(other_gradient.abs().max()))
        shared = {n: v for n, v in other_metrics.items() if n not in differs}
        assert {n: metrics[n] for n in shared} == pytest.approx(shared, rel=1e-5, abs=1e-6), name


def test_a_batch_without_samples_is_refused():
    curr, batch = make_batch(0)
    with pytest.raises(ValueError, match="no sample"):
        loss_of_columns(make_loss({}), curr[:0], {name: field[:0] for name, field in batch.items()}, *totals(batch))


def test_rows_taken_a_few_at_a_time_give_the_whole(monkeypatch):
    curr, batch = make_batch(1)
    for keys in ({}, GSPO, TERMS["all"]):
        whole = evaluate(make_loss(keys), curr, batch)
        monkeypatch.setitem(loss_module.CHUNK_VALUES, "cpu", 1)
        parts = evaluate(make_loss(keys), curr, batch)
        monkeypatch.undo()
        assert parts[0] == pytest.approx(whole[0], rel=1e-12)
        assert parts[1] == pytest.approx(whole[1], rel=1e-6)
        torch.testing.assert_close(parts[2], whole[2], rtol=1e-12, atol=0)
