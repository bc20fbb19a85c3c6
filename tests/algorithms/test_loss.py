"""The losses against float64 formulas written token by token, values and gradients.

Tolerance: log-probs are below 4 in size, so float32 ratios are good to 1e-6 and sums of some 30 tokens to 1e-5.
"""

import math
from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.algorithms.correction import RolloutError
from nemo_fp8rl.algorithms.loss import GrpoLoss, LossConfig, NllLoss
from nemo_fp8rl.batch import TrainBatch, rows
from nemo_fp8rl.errors import UserError

GARBAGE = [math.nan, math.inf, -math.inf, 1e30, 0.0]
TOLERANCE = {"rel": 1e-5, "abs": 1e-6}
CONFIGS = {
    "default": LossConfig(),
    "cap below": LossConfig(truncated_importance_sampling_ratio=0.9),
    "floor": LossConfig(truncated_importance_sampling_ratio_min=0.8),
    "not truncated": LossConfig(truncated_importance_sampling_type=None),
    "not corrected": LossConfig(use_importance_sampling_correction=False),
    "narrow clip": LossConfig(ratio_clip_min=0.01, ratio_clip_max=0.02),
}
EVERY_CONFIG = pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)


def make_batch(seed: int, garbage: float = 0.0) -> tuple[torch.Tensor, TrainBatch]:
    """(current log-probs [B, T-1], batch) with ragged rows, dropped samples, and `garbage` outside the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    b, t = 5, 8
    lengths = torch.randint(3, t + 1, (b,), generator=generator)
    starts = (lengths.float() * torch.rand(b, generator=generator)).long().clamp(min=1)
    position = torch.arange(t)
    token_mask = ((position >= starts[:, None]) & (position < lengths[:, None])).float()
    sample_mask = (torch.rand(b, generator=generator) < 0.8).float()
    sample_mask[0] = 1.0
    gen = -normal(b, t, scale=1.0).abs()
    prev = gen + normal(b, t, scale=0.3)
    curr = prev + normal(b, t, scale=0.3)
    advantages = normal(b, 1, scale=1.0).expand(b, t).clone()
    outside = (token_mask * sample_mask[:, None]) == 0
    for field in (gen, prev, curr, advantages):
        field[outside] = garbage
    batch = TrainBatch(
        input_ids=torch.zeros(b, t, dtype=torch.int64),
        input_lengths=lengths,
        token_mask=token_mask,
        sample_mask=sample_mask,
        advantages=advantages,
        generation_logprobs=gen,
        prev_logprobs=prev,
    )
    return curr[:, 1:].clone(), batch


def counts(batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Valid sequences and tokens of the whole batch."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return (mask.sum(-1) > 0).sum().float(), mask.sum()


def formula(curr: torch.Tensor, batch: TrainBatch, cfg: LossConfig) -> tuple[dict[str, float], torch.Tensor]:
    """(metrics, dL/dcurr) of the whole batch in float64, token by token."""
    total = float(counts(batch)[1])
    names = ("loss", "probs_ratio", "probs_ratio_clamped", "approx_entropy", "is_oob_ratio")
    metrics, gradient = dict.fromkeys(names, 0.0), torch.zeros(curr.shape, dtype=torch.float64)
    for i in range(curr.size(0)):
        for t in range(curr.size(1)):
            if not (batch["token_mask"][i, t + 1] and batch["sample_mask"][i]):
                continue
            c, p = float(curr[i, t]), float(batch["prev_logprobs"][i, t + 1])
            g, a = float(batch["generation_logprobs"][i, t + 1]), float(batch["advantages"][i, t + 1])
            r, w = math.exp(c - p), math.exp(p - g)
            clipped = min(max(r, 1 - cfg.ratio_clip_min), 1 + cfg.ratio_clip_max)
            bounded = w
            if not cfg.use_importance_sampling_correction:
                w = bounded = 1.0
            elif cfg.truncated_importance_sampling_type == "tis":
                floor = cfg.truncated_importance_sampling_ratio_min or 0.0
                bounded = min(max(w, floor), cfg.truncated_importance_sampling_ratio)
            metrics["loss"] += bounded * max(-a * r, -a * clipped) / total
            metrics["probs_ratio"] += r / total
            metrics["probs_ratio_clamped"] += clipped / total
            metrics["approx_entropy"] -= math.exp(c - g) * c / total  # NeMo RL: -E_gen[pi_curr / pi_gen log pi_curr]
            metrics["is_oob_ratio"] += (bounded != w) / total
            gradient[i, t] = bounded * -a * r / total if clipped == r or -a * r > -a * clipped else 0.0
    return metrics, gradient


def evaluate(loss, curr: torch.Tensor, batch: TrainBatch, totals=None):
    """(loss, metrics, dL/dcurr)."""
    curr = curr.clone().requires_grad_()
    value, metrics = loss(curr, batch, *(totals or counts(batch)))
    value.backward()
    return value.item(), metrics, curr.grad


@EVERY_CONFIG
def test_loss_and_gradient_equal_the_formula(cfg):
    for seed in range(20):
        curr, batch = make_batch(seed)
        value, metrics, gradient = evaluate(GrpoLoss(cfg), curr, batch)
        expected, expected_gradient = formula(curr, batch, cfg)
        assert value == pytest.approx(expected["loss"], **TOLERANCE)
        assert metrics["loss"] == value
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-7)


@EVERY_CONFIG
@pytest.mark.parametrize("name", ["probs_ratio", "probs_ratio_clamped", "approx_entropy", "is_oob_ratio"])
def test_metrics_are_nemo_rls(name, cfg):
    for seed in range(10):
        curr, batch = make_batch(seed)
        assert GrpoLoss(cfg)(curr, batch, *counts(batch))[1][name] == pytest.approx(
            formula(curr, batch, cfg)[0][name], **TOLERANCE
        )


def test_the_batches_reach_every_branch():
    reached = set()
    for seed in range(30):
        curr, batch = make_batch(seed)
        metrics, gradient = formula(curr, batch, LossConfig())
        inside = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:] > 0
        reached |= {("clipped", bool((gradient[inside] == 0).any())), ("truncated", metrics["is_oob_ratio"] > 0)}
        reached |= {("dropped", bool((batch["sample_mask"] == 0).any()))}
    assert {("clipped", True), ("truncated", True), ("dropped", True)} <= reached


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("loss", [GrpoLoss(LossConfig()), GrpoLoss(CONFIGS["not truncated"]), NllLoss()])
def test_padding_never_reaches_the_loss_or_its_gradient(loss, garbage):
    for seed in range(5):
        clean, dirty = (evaluate(loss, *make_batch(seed, junk)) for junk in (0.0, garbage))
        assert math.isfinite(clean[0])
        assert dirty[0] == clean[0]
        assert torch.equal(dirty[2], clean[2])
        mask = make_batch(seed)[1]
        outside = (mask["token_mask"] * mask["sample_mask"][:, None])[:, 1:] == 0
        assert outside.any()
        assert (dirty[2][outside] == 0).all()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("loss", [GrpoLoss(LossConfig()), NllLoss()])
def test_padding_never_reaches_a_metric(loss, garbage):
    for seed in range(5):
        assert evaluate(loss, *make_batch(seed, garbage))[1] == evaluate(loss, *make_batch(seed))[1]


@pytest.mark.parametrize("loss", [*map(GrpoLoss, CONFIGS.values()), NllLoss()])
@pytest.mark.parametrize(("seed", "size"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_microbatches_sum_to_the_whole(loss, seed, size):
    curr, batch = make_batch(seed)
    value, metrics, gradient = evaluate(loss, curr, batch)
    totals, summed, parts = counts(batch), dict.fromkeys(metrics, 0.0), []
    for start in range(0, len(curr), size):
        part = rows(batch, start, start + size)
        width = part["input_ids"].size(1) - 1
        _, part_metrics, part_gradient = evaluate(loss, curr[start : start + size, :width], part, totals)
        summed = {name: summed[name] + part_metrics[name] for name in summed}
        parts.append(torch.nn.functional.pad(part_gradient, (0, curr.size(1) - width)))
    assert summed["loss"] == pytest.approx(value, **TOLERANCE)
    assert summed == pytest.approx(metrics, **TOLERANCE)
    torch.testing.assert_close(torch.cat(parts), gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", [GrpoLoss(LossConfig()), NllLoss()])
@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_order_of_samples_does_not_matter(loss, order):
    curr, batch = make_batch(8)
    value, metrics, gradient = evaluate(loss, curr, batch)
    other = evaluate(loss, curr[order], {name: field[order] for name, field in batch.items()})
    assert other[0] == pytest.approx(value, **TOLERANCE)
    assert other[1] == pytest.approx(metrics, **TOLERANCE)
    torch.testing.assert_close(other[2], gradient[order], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss", [GrpoLoss(LossConfig()), NllLoss()])
def test_a_dropped_sample_counts_as_if_it_were_not_there(loss):
    curr, batch = make_batch(3)
    batch["sample_mask"] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    kept = [0, 2, 3]
    value, metrics, _ = evaluate(loss, curr, batch)
    other = evaluate(loss, curr[kept], {name: field[kept] for name, field in batch.items()})
    assert (value, metrics) == (pytest.approx(other[0], **TOLERANCE), pytest.approx(other[1], **TOLERANCE))


@EVERY_CONFIG
def test_equal_policies_give_the_plain_policy_gradient(cfg):
    if cfg.truncated_importance_sampling_ratio < 1:
        cfg = replace(cfg, truncated_importance_sampling_ratio=1.0)
    _, batch = make_batch(1)
    batch["generation_logprobs"] = batch["prev_logprobs"]
    value, metrics, gradient = evaluate(GrpoLoss(cfg), batch["prev_logprobs"][:, 1:], batch)
    total = counts(batch)[1]
    plain = -(batch["advantages"] * batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:] / total
    torch.testing.assert_close(gradient, plain, rtol=1e-6, atol=0)
    assert value == pytest.approx(plain.sum().item(), **TOLERANCE)
    assert (metrics["probs_ratio"], metrics["is_oob_ratio"]) == (pytest.approx(1.0), 0.0)


def test_a_large_cap_is_no_truncation():
    curr, batch = make_batch(2)
    capped = evaluate(GrpoLoss(LossConfig(truncated_importance_sampling_ratio=1e9)), curr, batch)
    free = evaluate(GrpoLoss(CONFIGS["not truncated"]), curr, batch)
    assert capped[:2] == free[:2]
    assert torch.equal(capped[2], free[2])


def test_equal_engine_and_trainer_need_no_correction():
    curr, batch = make_batch(4)
    batch["generation_logprobs"] = batch["prev_logprobs"]
    corrected, uncorrected = (evaluate(GrpoLoss(CONFIGS[name]), curr, batch) for name in ("default", "not corrected"))
    assert corrected[0] == uncorrected[0]
    assert torch.equal(corrected[2], uncorrected[2])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("field", ["generation_logprobs", "prev_logprobs"])
def test_a_logprob_that_is_not_finite_is_refused(field, bad):
    curr, batch = make_batch(0)
    row, position = (batch["token_mask"] * batch["sample_mask"][:, None]).nonzero()[-1]
    batch[field][row, position] = bad
    with pytest.raises(RolloutError, match=f"1 of .*{field}"):
        GrpoLoss(LossConfig())(curr, batch, *counts(batch))


def test_the_batch_is_left_as_it_was():
    curr, batch = make_batch(5)
    before = {name: field.clone() for name, field in batch.items()}
    evaluate(GrpoLoss(LossConfig()), curr, batch)
    assert all(torch.equal(batch[name], before[name]) for name in before)


def test_a_mapping_configures_the_loss_like_its_dataclass():
    keys = {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3, "truncated_importance_sampling_ratio": 1.1}
    curr, batch = make_batch(6)
    from_mapping, from_config = (
        evaluate(GrpoLoss(keys), curr, batch),
        evaluate(GrpoLoss(LossConfig(**keys)), curr, batch),
    )
    assert from_mapping[:2] == from_config[:2]
    assert GrpoLoss({}).cfg == LossConfig()


def test_an_unknown_key_of_a_mapping_is_named():
    with pytest.raises(UserError, match=r"loss_fn\.ratio_clip_c "):
        GrpoLoss({"ratio_clip_min": 0.2, "ratio_clip_c": 3.0})


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"truncated_importance_sampling_ratio": None}, "truncated_importance_sampling_type"),
        ({"truncated_importance_sampling_ratio": 0.0}, "truncated_importance_sampling_ratio"),
        ({"truncated_importance_sampling_ratio": -2.0}, "truncated_importance_sampling_ratio"),
        ({"truncated_importance_sampling_ratio": math.nan}, "truncated_importance_sampling_ratio"),
        ({"truncated_importance_sampling_ratio_min": 3.0}, "truncated_importance_sampling_ratio_min"),
        ({"ratio_clip_min": -0.1}, "ratio_clip_min"),
        ({"ratio_clip_min": 1.1}, "ratio_clip_min"),
        ({"ratio_clip_max": -0.1}, "ratio_clip_max"),
        ({"ratio_clip_max": math.nan}, "ratio_clip_max"),
        ({"token_level_loss": False}, "token_level_loss"),
        ({"reference_policy_kl_penalty": 0.1}, "reference_policy_kl_penalty"),
    ],
)
def test_keys_that_contradict_each_other_are_named(keys, named):
    with pytest.raises(UserError, match=rf"\b{named}\b"):
        GrpoLoss(keys)


def test_nll_is_the_mean_over_generated_tokens():
    curr, batch = make_batch(7)
    mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
    value, metrics, gradient = evaluate(NllLoss(), curr, batch)
    assert value == metrics["loss"] == pytest.approx(-curr[mask > 0].double().mean().item(), rel=1e-6)
    assert torch.equal(gradient, -mask / mask.sum())
