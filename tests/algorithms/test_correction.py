"""Rollout correction against double precision, token by token (reference.py), and at its edges.

Tolerance: the log-probs of `make_batch` are multiples of 2^-10, so float32 is exact until it takes a power; weights are
good to 1e-6. Decisions (kept or not, at a bound or not) are equal.
"""

import math
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.algorithms.correction import RolloutError, correct, refuse_nonfinite
from nemo_fp8rl.algorithms.correction_config import PRESETS, CorrectionConfig, Rule, Statistic
from nemo_fp8rl.common.errors import UserError
from tests.algorithms import reference
from tests.algorithms.losses import make_loss, read_correction
from tests.algorithms.reference import GARBAGE, make_batch
from tests.batches import correct_columns, loss_of_columns

SEEDS = range(12)
BOUNDS = {
    "token_k1": [(1.2, None), (None, 0.8), (1.3, 0.7)],
    "token_k2": [(0.02, None), (0.1, 0.001)],
    "token_k3": [(0.02, None), (0.1, 0.001)],
    "token_probability_difference": [(0.05, None), (0.2, 0.01)],
    "seq_sum_k1": [(1.2, None), (None, 0.8), (2.0, 0.5)],
    "seq_sum_k2": [(0.3, None), (1.0, 0.1)],
    "seq_sum_k3": [(0.3, None), (1.0, 0.1)],
    "seq_mean_k1": [(1.05, None), (None, 0.95), (1.1, 0.9)],
    "seq_mean_k2": [(0.1, None), (0.2, 0.02)],
    "seq_mean_k3": [(0.1, None), (0.2, 0.02)],
    "seq_max_k1": [(1.6, None), (None, 0.6), (2.0, 0.5)],
    "seq_max_k2": [(0.2, None), (0.5, 0.05)],
    "seq_max_k3": [(0.2, None), (0.5, 0.05)],
}
"""(max, min): bounds that keep some of the tokens of `make_batch` and reject others."""
EVERY_RULE = [Rule(name, high, low) for name, pairs in BOUNDS.items() for high, low in pairs]
WEIGHTS = ("none", "token", "sequence", "geometric")
WEIGHT_BOUNDS = [(None, None), (None, 1.1), (0.9, None), (0.9, 1.1)]


def rule_name(rule: Rule) -> str:
    return f"{rule.statistic}-{rule.min}-{rule.max}"


def arguments(batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(prev, gen, mask), [B, T]."""
    return batch["prev_logprobs"], batch["generation_logprobs"], batch["token_mask"] * batch["sample_mask"][:, None]


def expected(batch, cfg: CorrectionConfig) -> SimpleNamespace:
    """What `correct` must return, from the reference."""
    curr = torch.zeros(batch["token_mask"].size(0), batch["token_mask"].size(1) - 1)
    samples = reference.read(curr, batch, bypass=cfg.bypass)
    rules = [(rule.statistic, rule.max, rule.min) for rule in cfg.reject]
    reference.correct(samples, cfg.weight, cfg.weight_min, cfg.weight_max, rules, cfg.normalize)
    shape = batch["token_mask"].shape
    made = SimpleNamespace(
        weights=torch.zeros(shape, dtype=torch.float64),
        kept=torch.zeros(shape, dtype=torch.bool),
        clamped=torch.zeros(shape, dtype=torch.bool),
        nonfinite=sum(sample.lost for sample in samples),
        samples=samples,
    )
    for sample in samples:
        for token in sample.tokens:
            place = sample.row, token.position + 1
            made.weights[place], made.kept[place], made.clamped[place] = token.weight, token.kept, token.outside
    return made


def assert_equals_reference(batch, cfg: CorrectionConfig) -> SimpleNamespace:
    cfg, wanted = cfg.resolve(), expected(batch, cfg.resolve())
    made = correct(*arguments(batch), cfg)
    assert made.weights.dtype == made.nonfinite.dtype == torch.float32
    torch.testing.assert_close(made.weights.double(), wanted.weights, rtol=1e-6, atol=0)
    assert torch.equal(made.kept, wanted.kept)
    assert torch.equal(made.clamped, wanted.clamped)
    assert made.nonfinite == wanted.nonfinite
    return wanted


def single(prev: float, gen: float, length: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row of equal tokens, as arguments of `correct`."""
    return torch.full((1, length), prev), torch.full((1, length), gen), torch.ones(1, length)


# Formulas


@pytest.mark.parametrize(("low", "high"), WEIGHT_BOUNDS)
@pytest.mark.parametrize(
    ("weight", "normalize"), [("none", False), *((w, n) for w in WEIGHTS[1:] for n in (False, True))]
)
def test_weights_equal_the_formula(weight, normalize, low, high):
    reached = set()
    for seed in SEEDS:
        _, batch = make_batch(seed)
        wanted = assert_equals_reference(batch, CorrectionConfig(None, weight, high, low, normalize=normalize))
        reached |= {bool(value) for value in wanted.clamped[wanted.kept]}
    assert False in reached or weight == "sequence"
    assert (True in reached) == ((low, high) != (None, None) and weight != "none")


@pytest.mark.parametrize("rule", EVERY_RULE, ids=rule_name)
@pytest.mark.parametrize("weight", ["none", "token"])
def test_a_rule_keeps_and_rejects_what_its_formula_says(rule, weight):
    kept = []
    for seed in SEEDS:
        _, batch = make_batch(seed)
        wanted = assert_equals_reference(batch, CorrectionConfig(None, weight, None, reject=(rule,)))
        kept += wanted.kept[reference.inside(batch)].tolist()
    assert 0.05 < sum(kept) / len(kept) < 0.95


def test_every_statistic_is_covered():
    assert set(BOUNDS) == set(get_args(Statistic))


@pytest.mark.parametrize("weight", ["none", "token", "sequence", "geometric"])
def test_chained_rules_must_all_hold(weight):
    rules = (Rule("token_k1", 1.3, 0.7), Rule("seq_mean_k3", 0.2), Rule("seq_max_k1", None, 0.3))
    alone, together = torch.zeros(3), 0
    for seed in range(30):
        _, batch = make_batch(seed)
        for cfg in (CorrectionConfig(None, weight, 1.1, 0.5, rules, n) for n in (False, weight != "none")):
            assert_equals_reference(batch, cfg)
        each = [correct(*arguments(batch), CorrectionConfig(None, weight, None, reject=(rule,))).kept for rule in rules]
        chained = correct(*arguments(batch), CorrectionConfig(None, weight, None, reject=rules)).kept
        assert torch.equal(chained, each[0] & each[1] & each[2])
        alone += torch.tensor([float((kept & ~chained).sum()) for kept in each])
        together += int(chained.sum())
    assert (alone > 0).all()  # each rule is the one that rejects, somewhere
    assert together > 0


PRESET_TABLE = {
    "none": ("none", None, None, ()),
    "bypass": ("none", None, None, ()),
    "is": ("token", None, None, ()),
    "tis": ("token", None, 2.0, ()),
    "seq-tis": ("sequence", None, 5.0, ()),
    "geo-tis": ("geometric", 0.5, 2.0, ()),
    "icepop": ("token", None, None, (("token_k1", 5.0, 0.5),)),
    "mis": ("token", None, None, (("token_k1", 2.0, 0.5),)),
    "seq-mis": ("sequence", None, None, (("seq_sum_k1", 2.0, 0.5),)),
    "seq-mask-tis": ("token", None, None, (("seq_mean_k1", 1.002, 0.999),)),
    "geo-rs": ("none", None, None, (("seq_mean_k1", 1.001, 0.999),)),
    "geo-rs-token-tis": ("token", None, 2.0, (("seq_mean_k1", 1.001, 0.999),)),
    "k3-rs": ("none", None, None, (("seq_mean_k3", 0.01, None),)),
    "veto": ("token", None, 2.0, (("seq_max_k1", None, 1e-4),)),
    "ipo": ("token", None, None, (("token_probability_difference", 0.1, None),)),
    "sparse-rl": ("token", None, 1.5, (("token_k1", 1.5, 0.5), ("seq_max_k1", None, 1e-4))),
    "trm": ("none", None, None, (("seq_max_k3", 0.3, None),)),
}
"""(weight, min, max, rules as (statistic, max, min)), as docs/correction.md gives them."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_source_says(name):
    weight, low, high, rules = PRESET_TABLE[name]
    cfg = read_correction({"preset": name})
    assert (cfg.weight, cfg.weight_min, cfg.weight_max) == (weight, low, high)
    assert tuple((rule.statistic, rule.max, rule.min) for rule in cfg.reject) == rules
    assert (cfg.bypass, cfg.normalize, cfg.denominator) == (name == "bypass", name == "sparse-rl", "all")
    for seed in range(4):
        _, batch = make_batch(seed)
        if name != "bypass":
            assert_equals_reference(batch, PRESETS[name])


BY_TOKEN = {
    "none": lambda p, q: 1.0,
    "is": lambda p, q: p / q,  # NeMo RL, ClippedPGLossFn
    "tis": lambda p, q: min(p / q, 2.0),  # verl, rollout_corr_helper.py
    "icepop": lambda p, q: p / q * (0.5 <= p / q <= 5.0),  # NeMo RL, ClippedPGLossFn
    "mis": lambda p, q: p / q * (math.log(1 / 2) <= math.log(q / p) <= math.log(2)),  # verl, a token_k1 of 2.0
    "ipo": lambda p, q: p / q * (abs(p - q) <= 0.1),  # prime-rl 559b4477, ipo_loss_fn
    "trm": lambda p, q: 1.0 * (p / q - 1 - math.log(p / q) <= 0.3),  # arXiv 2512.23075, of one token
}
"""Weight of a token that the trainer gives probability p and the engine q, in the first update, by its source."""


@pytest.mark.parametrize("name", BY_TOKEN)
def test_the_gradient_of_a_token_is_that_of_the_presets_source(name):
    loss = make_loss({"reference_policy_kl_penalty": 0.0}, {"preset": name})
    for p, q in ((0.7, 0.3), (0.3, 0.7), (0.35, 0.3), (0.3, 0.35), (0.5, 0.3), (0.3, 0.5), (0.02, 0.05), (0.6, 0.1)):
        for advantage in (1.0, -1.0):
            prev, gen, _ = single(math.log(p), math.log(q), 2)
            mask = torch.tensor([[0.0, 1.0]])
            batch = {"prev_logprobs": prev, "generation_logprobs": gen, "token_mask": mask}
            batch |= {"sample_mask": torch.ones(1), "advantages": advantage * mask}
            curr = prev[:, 1:].clone().requires_grad_()
            corrected, _ = correct_columns(batch, loss.correction)
            loss_of_columns(loss, curr, corrected, torch.tensor(1.0), torch.tensor(1.0))[0].backward()
            assert curr.grad.item() == pytest.approx(-advantage * BY_TOKEN[name](p, q), rel=1e-5)


def test_sparse_rl_differs_from_its_code_by_one_factor_for_all_tokens():
    """Its code: min(rho, 1.5), over the mean of that of all tokens; 0 outside [0.5, 1.5] and where a token is below
    1e-4. Here the mean is of the tokens that are left.
    """
    factors = []
    for seed in range(8):
        _, batch = make_batch(seed)
        prev, gen, mask = arguments(batch)
        inside = mask > 0
        rho = torch.where(inside, prev.double() - gen.double(), 0.0).exp()
        truncated = rho.clamp(max=1.5)
        kept = inside & (rho >= 0.5) & (rho <= 1.5) & (rho >= 1e-4).all(-1, keepdim=True)
        theirs = torch.where(kept, truncated / truncated[inside].mean(), 0.0)
        made = correct(prev, gen, mask, PRESETS["sparse-rl"])
        assert torch.equal(made.kept, kept)
        factor = truncated[inside].mean() / truncated[kept].mean()
        torch.testing.assert_close(made.weights.double(), theirs * factor, rtol=1e-6, atol=0)
        factors.append(factor.item())
    assert max(abs(factor - 1) for factor in factors) > 0.01


def test_the_bound_of_trm_is_the_users_and_its_rule_is_not():
    reject = [{"statistic": "seq_max_k3", "max": 0.05}]
    assert read_correction({"preset": "trm", "reject": reject}) == replace(PRESETS["trm"], reject=(Rule(**reject[0]),))
    for rules in ([], [{"statistic": "seq_max_k2", "max": 0.05}], [*reject, {"statistic": "token_k1", "max": 2.0}]):
        with pytest.raises(UserError, match=r"reject contradicts .*preset=trm"):
            read_correction({"preset": "trm", "reject": rules})
    with pytest.raises(UserError, match=r"reject\[0\].*neither min nor max"):
        read_correction({"preset": "trm", "reject": [{"statistic": "seq_max_k3"}]})


def test_there_is_no_preset_that_is_not_in_the_table():
    assert set(PRESETS) == set(PRESET_TABLE)


def test_float64_and_bfloat16_logprobs_are_taken_too():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        _, batch = make_batch(3)
        for name in ("prev_logprobs", "generation_logprobs"):
            batch[name] = batch[name].to(torch.bfloat16).to(dtype)  # the same numbers in every dtype
        assert_equals_reference(batch, CorrectionConfig(weight="token", weight_max=1.2))


# Direction: a token that the trainer likes more has l > 0, rho > 1


def test_a_token_that_the_trainer_likes_more_than_the_engine_weighs_more():
    more, less = single(math.log(0.6), math.log(0.3), 2), single(math.log(0.3), math.log(0.6), 2)
    weights = {w: correct(*more, CorrectionConfig(weight=w, weight_max=None)).weights[0, 0].item() for w in WEIGHTS}
    assert weights == pytest.approx({"none": 1.0, "token": 2.0, "sequence": 4.0, "geometric": 2.0})
    weights = {w: correct(*less, CorrectionConfig(weight=w, weight_max=None)).weights[0, 0].item() for w in WEIGHTS}
    assert weights == pytest.approx({"none": 1.0, "token": 0.5, "sequence": 0.25, "geometric": 0.5})


@pytest.mark.parametrize("statistic", ["token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1"])
def test_max_rejects_what_the_trainer_likes_more_and_min_what_it_likes_less(statistic):
    more, less = single(math.log(0.6), math.log(0.3)), single(math.log(0.3), math.log(0.6))
    above = CorrectionConfig(weight="none", weight_max=None, reject=(Rule(statistic, max=1.5),))
    below = CorrectionConfig(weight="none", weight_max=None, reject=(Rule(statistic, min=0.7),))
    assert [correct(*side, above).kept.item() for side in (more, less)] == [False, True]
    assert [correct(*side, below).kept.item() for side in (more, less)] == [True, False]


def test_bounds_that_exclude_agreement_look_at_the_tokens_of_the_mask_alone():
    """rho = 1 is what masked tokens must not be taken for."""
    prev, gen, mask = single(-1.0, -1.5, 4)  # rho = 1.65
    mask[0, 2:] = 0
    for statistic in ("token_k1", "seq_sum_k1", "seq_mean_k1", "seq_max_k1"):
        low = CorrectionConfig(weight="none", weight_max=None, reject=(Rule(statistic, min=1.2),))
        assert correct(prev, gen, mask, low).kept.tolist() == [[True, True, False, False]]
        high = CorrectionConfig(weight="none", weight_max=None, reject=(Rule(statistic, max=0.8),))
        assert correct(gen, prev, mask, high).kept.tolist() == [[True, True, False, False]]


def test_k3_is_the_larger_on_the_side_where_the_trainer_likes_the_token_more():
    rule = (Rule("token_k3", max=0.45),)
    cfg = CorrectionConfig(weight="none", weight_max=None, reject=rule)  # e^l - 1 - l at l = 0.9 and -0.9: .56, .31
    assert not correct(*single(-1.0, -1.9), cfg).kept.item()
    assert correct(*single(-1.9, -1.0), cfg).kept.item()


# Edges


@pytest.mark.parametrize("cfg", [*PRESETS.values(), *(CorrectionConfig(reject=(rule,)) for rule in EVERY_RULE)])
def test_what_lies_outside_the_mask_changes_nothing(cfg):
    for seed in range(3):
        clean, dirty = (correct(*arguments(make_batch(seed, garbage=junk)[1]), cfg) for junk in ((0.0,), GARBAGE))
        for name in ("weights", "kept", "nonfinite", "clamped"):
            assert torch.equal(getattr(clean, name), getattr(dirty, name))
        outside = ~reference.inside(make_batch(seed)[1])
        assert outside.any()
        assert not dirty.weights[outside].any() and not dirty.kept[outside].any() and not dirty.clamped[outside].any()


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("field", ["prev_logprobs", "generation_logprobs"])
@pytest.mark.parametrize(
    "cfg",
    [
        CorrectionConfig(weight="none", weight_max=None),
        CorrectionConfig(weight_min=0.5),
        CorrectionConfig(weight="sequence", normalize=True),
        CorrectionConfig(weight="geometric", reject=(Rule("seq_mean_k1", 1.2, 0.8), Rule("seq_max_k3", 1.0))),
    ],
)
def test_a_token_without_a_finite_logprob_is_dropped_counted_and_no_part_of_its_sequence(cfg, field, bad):
    for seed in range(4):
        _, batch = make_batch(seed)
        places = reference.inside(batch).nonzero()[::3]
        for row, position in places:
            batch[field][row, position] = bad
        wanted = assert_equals_reference(batch, cfg)
        assert wanted.nonfinite == len(places)
        without = {**batch, "token_mask": batch["token_mask"].clone()}
        without["token_mask"][places[:, 0], places[:, 1]] = 0
        assert torch.equal(correct(*arguments(batch), cfg).weights, correct(*arguments(without), cfg).weights)


def test_logprobs_that_are_not_finite_in_both_policies_count_once():
    prev, gen, mask = single(-1.0, -1.0, 4)
    prev[0, :2], gen[0, 1:3] = -math.inf, -math.inf
    made = correct(prev, gen, mask, PRESETS["tis"])
    assert (made.nonfinite.item(), made.kept.tolist()) == (3, [[False, False, False, True]])


@pytest.mark.parametrize("weight", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("difference", [200.0, -200.0, 1e30, -1e30])
def test_ratios_beyond_float32_stay_finite_and_on_their_side(weight, difference):
    prev, gen = (difference, 0.0) if difference < 0 else (0.0, -difference)
    free = correct(*single(prev, gen, 3), CorrectionConfig(weight=weight, weight_max=None))
    assert free.weights.isfinite().all() and free.weights.square().isfinite().all()
    assert (free.weights > 1e12).all() if difference > 0 else (free.weights < 1e-12).all()
    bounded = correct(*single(prev, gen, 3), CorrectionConfig(weight=weight, weight_max=2.0, weight_min=0.5))
    assert bounded.weights.tolist() == [[2.0 if difference > 0 else 0.5] * 3]


@pytest.mark.parametrize("statistic", get_args(Statistic))
@pytest.mark.parametrize("difference", [200.0, 1e30])
def test_ratios_beyond_float32_are_rejected_by_every_rule(statistic, difference):
    cfg = CorrectionConfig(weight="none", weight_max=None, reject=(Rule(statistic, 0.9 if "prob" in statistic else 3),))
    assert not correct(*single(0.0, -difference, 2), cfg).kept.any()


def test_a_batch_that_is_rejected_to_the_last_token_says_so():
    _, batch = make_batch(0)
    corrected, metrics = correct_columns(batch, CorrectionConfig(reject=(Rule("token_k1", 1e-9),), normalize=True))
    assert not corrected["importance_weights"].any()
    assert metrics["correction/kept_tokens"] == 0
    assert metrics["correction/rejected_token_ratio"] == metrics["correction/rejected_sequence_ratio"] == 1
    assert metrics["correction/weight_mean"] == metrics["correction/weight_max"] == 0


def test_weights_carry_no_gradient():
    prev, gen, mask = single(-1.0, -2.0)
    assert not correct(prev.requires_grad_(), gen.requires_grad_(), mask, PRESETS["tis"]).weights.requires_grad


# The mean of the weights


def test_normalized_weights_have_mean_one_over_what_is_kept():
    _, batch = make_batch(5)
    rule = (Rule("token_k1", 1.5),)
    token = correct(*arguments(batch), CorrectionConfig(weight_max=1.3, reject=rule, normalize=True))
    assert token.weights[token.kept].double().mean().item() == pytest.approx(1, rel=1e-6)
    sequence = correct(*arguments(batch), CorrectionConfig(weight="sequence", weight_max=None, normalize=True))
    assert sequence.weights.amax(-1)[sequence.kept.any(-1)].double().mean().item() == pytest.approx(1, rel=1e-6)


# Properties


CONFIGS = [
    *(cfg for name, cfg in PRESETS.items() if name != "none"),
    CorrectionConfig(None, "sequence", 3.0, 0.2, (Rule("token_k1", 1.5, 0.5), Rule("seq_mean_k3", 0.3)), True),
]
seeds = st.integers(0, 2**31)
configs = st.sampled_from(CONFIGS)
quick = settings(deadline=None, max_examples=100)


@quick
@given(seeds, configs, st.permutations(range(8)))
def test_the_order_of_rows_does_not_matter(seed, cfg, order):
    _, batch = make_batch(seed)
    made = correct(*arguments(batch), cfg)
    other = correct(*(tensor[order] for tensor in arguments(batch)), cfg)
    torch.testing.assert_close(other.weights, made.weights[order], rtol=1e-6, atol=0)
    assert torch.equal(other.kept, made.kept[order]) and torch.equal(other.clamped, made.clamped[order])


@quick
@given(seeds, configs, st.integers(0, 20), st.sampled_from(GARBAGE))
def test_more_padding_changes_nothing(seed, cfg, more, junk):
    _, batch = make_batch(seed)
    prev, gen, mask = arguments(batch)
    width = mask.size(1)
    padded = [torch.nn.functional.pad(t, (0, more), value=v) for t, v in ((prev, junk), (gen, -3.0), (mask, 0.0))]
    made, other = correct(prev, gen, mask, cfg), correct(*padded, cfg)
    torch.testing.assert_close(other.weights[:, :width], made.weights, rtol=1e-6, atol=0)
    assert torch.equal(other.kept[:, :width], made.kept) and not other.weights[:, width:].any()


@quick
@given(seeds, configs.filter(lambda cfg: not cfg.normalize), st.lists(st.integers(0, 8), max_size=4))
def test_parts_of_a_batch_are_decided_like_the_whole(seed, cfg, cuts):
    _, batch = make_batch(seed)
    whole = correct(*arguments(batch), cfg)
    parts = [
        correct(*part, cfg) for part in zip(*(t.tensor_split(sorted(cuts)) for t in arguments(batch)), strict=True)
    ]
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights, rtol=1e-6, atol=0)
    for name in ("kept", "clamped"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert sum(part.nonfinite for part in parts) == whole.nonfinite


@pytest.mark.parametrize("cfg", [cfg for cfg in CONFIGS if not cfg.normalize])
def test_a_batch_that_is_larger_than_a_cache_is_decided_like_its_rows(cfg):
    generator = torch.Generator().manual_seed(0)
    gen = -torch.rand(40, 8192, generator=generator)
    prev = gen + 0.1 * torch.randn(40, 8192, generator=generator)
    prev[::3, 7], gen[1::7, 11] = math.nan, -math.inf
    mask = (torch.rand(40, 8192, generator=generator) < 0.9).float()
    whole, rows = (
        correct(prev, gen, mask, cfg),
        [correct(*row, cfg) for row in zip(prev.split(1), gen.split(1), mask.split(1), strict=True)],
    )
    torch.testing.assert_close(whole.weights, torch.cat([row.weights for row in rows]), rtol=1e-5, atol=0)
    for name in ("kept", "clamped"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(row, name) for row in rows]))
    assert whole.nonfinite == sum(row.nonfinite for row in rows) > 1


@quick
@given(seeds, st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from(get_args(Statistic)))
def test_bounds_at_infinity_are_no_bounds(seed, weight, statistic):
    _, batch = make_batch(seed)
    free = correct(*arguments(batch), CorrectionConfig(weight=weight, weight_max=None))
    for cfg in (
        CorrectionConfig(weight=weight, weight_max=math.inf),
        CorrectionConfig(weight=weight, weight_max=1e9, weight_min=0.0),
        CorrectionConfig(weight=weight, weight_max=None, reject=(Rule(statistic, max=math.inf),)),
        CorrectionConfig(weight=weight, weight_max=None, reject=(Rule(statistic, max=1e9, min=0.0),)),
    ):
        made = correct(*arguments(batch), cfg)
        assert torch.equal(made.weights, free.weights) and torch.equal(made.kept, free.kept)
        assert not made.clamped.any()


@quick
@given(seeds, st.floats(0.05, 1.0), st.floats(1.0, 20.0))
def test_two_policies_that_agree_are_not_corrected(seed, low, high):
    _, batch = make_batch(seed)
    batch["prev_logprobs"] = batch["generation_logprobs"]
    rules = tuple(Rule(name, high, low if name.endswith("_k1") else None) for name in get_args(Statistic))
    for weight in WEIGHTS:
        made = correct(*arguments(batch), CorrectionConfig(None, weight, high, low, rules))
        assert torch.equal(made.weights, reference.inside(batch).float())
        assert not made.clamped.any()


@quick
@given(seeds, st.sampled_from(EVERY_RULE), st.floats(1.0, 3.0))
def test_wider_bounds_keep_at_least_as_much(seed, rule, factor):
    _, batch = make_batch(seed)
    wider = replace(rule, max=rule.max and rule.max * factor, min=rule.min and rule.min / factor)
    narrow, wide = (
        correct(*arguments(batch), CorrectionConfig(weight="none", weight_max=None, reject=(one,))).kept
        for one in (rule, wider)
    )
    assert not (narrow & ~wide).any()


# A batch


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_a_corrected_batch_says_what_was_done_to_it(name, denominator):
    for seed in range(6):
        _, batch = make_batch(seed, size=9)
        before = {field: tensor.clone() for field, tensor in batch.items()}
        corrected, metrics = correct_columns(batch, replace(PRESETS[name], denominator=denominator))
        assert all(
            torch.equal(batch[f].nan_to_num(7), before[f].nan_to_num(7)) for f in before
        )  # the input is as it was
        wanted, inside = expected(batch, PRESETS[name]), reference.inside(batch)
        torch.testing.assert_close(corrected["importance_weights"].double(), wanted.weights, rtol=1e-6, atol=0)
        kept_rows = wanted.kept.any(-1)
        if denominator == "kept":
            assert torch.equal(corrected["token_mask"], wanted.kept.float())
            assert torch.equal(corrected["sample_mask"], kept_rows.float() * batch["sample_mask"])
        else:
            assert torch.equal(corrected["token_mask"], batch["token_mask"])
            assert torch.equal(corrected["sample_mask"], batch["sample_mask"])
        tokens, rows = int(inside.sum()), int(inside.any(-1).sum())
        kept = [token.weight for sample in wanted.samples for token in sample.tokens if token.kept]
        assert metrics == pytest.approx(
            {
                "correction/rejected_token_ratio": 1 - len(kept) / tokens,
                "correction/rejected_sequence_ratio": 1 - int(kept_rows.sum()) / rows,
                "correction/weight_mean": math.fsum(kept) / max(len(kept), 1),
                "correction/weight_max": max(kept, default=0.0),
                "correction/kept_tokens": len(kept),
                "correction/nonfinite_logprob_ratio": 0.0,
            },
            rel=1e-6,
            abs=1e-12,
        )


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("field", ["prev_logprobs", "generation_logprobs"])
def test_too_many_nonfinite_logprobs_are_refused(field, bad):
    _, batch = make_batch(1)
    tokens = int(reference.inside(batch).sum())
    for row, position in reference.inside(batch).nonzero()[:3]:
        batch[field][row, position] = bad
    allowed = CorrectionConfig(max_nonfinite_fraction=3 / tokens)
    assert correct_columns(batch, allowed)[1]["correction/nonfinite_logprob_ratio"] == pytest.approx(3 / tokens)
    with pytest.raises(RolloutError, match=rf"3 of {tokens} generated tokens .*max_nonfinite_fraction=0\."):
        correct_columns(batch, CorrectionConfig(max_nonfinite_fraction=2.9 / tokens))
    with pytest.raises(RolloutError, match=r"generation_logprobs or prev_logprobs"):
        correct_columns(batch, CorrectionConfig())  # 1 % by default


def test_the_limit_itself_is_allowed_and_no_tokens_are_no_error():
    refuse_nonfinite(1, 100, 0.01)
    refuse_nonfinite(0, 0, 0.0)
    with pytest.raises(RolloutError):
        refuse_nonfinite(1, 100, 0.0099)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("prev_logprobs", lambda tensor: tensor[:, 1:]),
        ("prev_logprobs", lambda tensor: tensor[:1]),
        ("prev_logprobs", lambda tensor: tensor[0]),
        ("prev_logprobs", lambda tensor: tensor.long()),
        ("generation_logprobs", lambda tensor: tensor[:, :1]),
        ("generation_logprobs", lambda tensor: tensor.long()),
    ],
)
def test_a_tensor_of_a_wrong_shape_or_dtype_is_named(field, wrong):
    _, batch = make_batch(0, garbage=(0.0,))
    batch[field] = wrong(batch[field])
    for call in (lambda: correct(*arguments(batch), PRESETS["tis"]), lambda: correct_columns(batch, PRESETS["tis"])):
        with pytest.raises(ValueError, match=field):
            call()


def test_a_batch_without_samples_is_refused():
    _, batch = make_batch(0)
    with pytest.raises(ValueError, match=r"no sample|empty"):
        correct_columns({name: field[:0] for name, field in batch.items()}, PRESETS["tis"])


def test_a_batch_without_tokens_has_nothing_rejected():
    _, batch = make_batch(0)
    batch["sample_mask"] = torch.zeros_like(batch["sample_mask"])
    corrected, metrics = correct_columns(batch, PRESETS["tis"])
    assert not any(metrics.values()) and not corrected["importance_weights"].any()


def test_bypass_reads_the_engines_logprobs_alone():
    _, batch = make_batch(2)
    batch["prev_logprobs"] = torch.full_like(batch["prev_logprobs"], math.nan)
    corrected, metrics = correct_columns(batch, PRESETS["bypass"])
    assert torch.equal(corrected["importance_weights"], reference.inside(batch).float())
    assert metrics["correction/rejected_token_ratio"] == 0


# Configuration


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"preset": "tiss"}, ["preset='tiss'", "icepop", "seq-mask-tis"]),
        ({"preset": "${oc.env:PRESET}"}, ["preset=${oc.env:PRESET} must be a name itself"]),
        ({"preset": "tis", "weight_max": 3.0}, ["weight_max", "preset=tis", "with preset=null"]),
        ({"preset": "tis", "weight": "sequence"}, ["weight ", "preset=tis"]),
        ({"preset": "icepop", "weight_max": 2.0}, ["weight_max ", "preset=icepop"]),  # as without a preset
        ({"preset": "none", "weight": "token"}, ["weight ", "preset=none"]),
        ({"preset": "veto", "reject": []}, ["reject ", "preset=veto"]),
        ({"preset": "tis", "denominator": "keep"}, ["denominator='keep'", "'all' or 'kept'"]),
        ({"preset": "none", "weight_min": 0.1}, ["weight_min", "preset=none"]),
        ({"preset": "tis", "normalize": True}, ["normalize", "preset=tis"]),
        ({"preset": "tis", "bypass": True}, ["bypass", "preset=tis"]),
        ({"preset": "tis", "reject": [{"statistic": "token_k1", "max": 2.0}]}, ["reject", "preset=tis"]),
        ({"weights": "token"}, ["unknown config key", "weights", "did you mean nemo_fp8rl.correction.weight?"]),
        ({"weight": "tokens"}, ["weight='tokens'", "'none', 'token', 'sequence' or 'geometric'"]),
        ({"weight_min": 3.0}, ["weight_min=3.0", "weight_max=2.0", "weight_min <= weight_max"]),
        ({"weight_min": -0.1}, ["weight_min=-0.1", "0 <= weight_min"]),
        ({"weight_max": 0.0}, ["weight_max=0.0", "above 0"]),
        ({"weight_max": math.nan}, ["weight_max=nan"]),
        ({"weight_min": math.nan}, ["weight_min=nan"]),
        ({"max_nonfinite_fraction": 1.1}, ["max_nonfinite_fraction=1.1", "0..1"]),
        ({"max_nonfinite_fraction": -0.1}, ["max_nonfinite_fraction=-0.1"]),
        ({"max_nonfinite_fraction": math.nan}, ["max_nonfinite_fraction=nan"]),
        ({"weight": "none", "normalize": True}, ["normalize=true", "weight is none"]),
        ({"bypass": True}, ["bypass=true", "weight=none"]),
        (
            {"bypass": True, "weight": "none", "reject": [{"statistic": "token_k1", "max": 2.0}]},
            ["bypass=true", "no reject rules"],
        ),
        ({"denominator": "keep"}, ["denominator='keep'", "'all' or 'kept'"]),
        ({"reject": [{"statistic": "token_k4", "max": 1.0}]}, ["reject[0].statistic='token_k4'", "token_k3"]),
        ({"reject": [{"statistic": "token_k1"}]}, ["reject[0]", "neither min nor max"]),
        ({"reject": [{"statistic": "token_k1", "max": 0.5, "min": 0.6}]}, ["reject[0]", "min=0.6", "max=0.5"]),
        ({"reject": [{"statistic": "token_k1", "max": math.nan}]}, ["reject[0]", "max=nan"]),
        ({"reject": [{"statistic": "token_k1", "min": -1.0}]}, ["reject[0]", "min=-1.0"]),
        (
            {"reject": [{"statistic": "token_k1", "max": 2}, {"statistic": "token_k2", "min": 1}]},
            ["reject[1]", "give max"],
        ),
        (
            {"reject": [{"statistic": "token_k1", "maximum": 2.0}]},
            ["unknown config key", "reject[0].maximum"],
        ),
        ({"reject": [{"max": 2.0}]}, ["reject[0]", "statistic"]),
        ({"reject": {"statistic": "token_k1", "max": 2.0}}, ["reject", "list"]),
    ],
)
def test_keys_that_contradict_each_other_are_named_with_the_fix(keys, named):
    with pytest.raises(UserError) as error:
        read_correction(keys)
    message = str(error.value)
    assert "nemo_fp8rl.correction" in message
    assert [part for part in named if part not in message] == []


def test_a_preset_leaves_the_denominator_and_the_limit_to_the_user():
    cfg = read_correction({"preset": "icepop", "denominator": "kept", "max_nonfinite_fraction": 0.0})
    assert (cfg.reject, cfg.denominator, cfg.max_nonfinite_fraction) == ((Rule("token_k1", 5.0, 0.5),), "kept", 0.0)
    assert cfg.preset is None  # resolved: resolving it again changes nothing
    assert cfg.resolve() == cfg


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_may_be_spelled_out_beside_its_name(name):
    spelled = {f.name: getattr(PRESETS[name], f.name) for f in fields(CorrectionConfig)} | {"preset": name}
    spelled["reject"] = [asdict(rule) for rule in spelled["reject"]]
    assert read_correction(spelled) == read_correction({"preset": name}) == PRESETS[name]


def test_a_mapping_is_read_like_its_dataclass():
    rules = [{"statistic": "token_k1", "max": 2.0}, {"statistic": "seq_max_k1", "min": 0.1}]
    wanted = CorrectionConfig(weight="geometric", reject=(Rule("token_k1", 2.0), Rule("seq_max_k1", None, 0.1)))
    assert read_correction({"weight": "geometric", "reject": rules}) == wanted
    assert read_correction({}) == CorrectionConfig()
    assert read_correction({**asdict(wanted), "reject": rules}) == wanted


@pytest.mark.parametrize(
    ("preset", "line"),
    [
        ("none", "weight none"),
        ("bypass", "bypass"),
        ("geo-tis", "weight geometric from 0.5 to 2.0"),
        ("seq-mask-tis", "weight token; seq_mean_k1 within 0.999..1.002; denominator all"),
        ("veto", "weight token to 2.0; seq_max_k1 within 0.0001..; denominator all"),
    ],
)
def test_a_correction_is_logged_in_one_line(preset, line):
    assert str(PRESETS[preset].resolve()) == line
