"""Gates: what trips, what wins, and which entry of the recipe is named when it is wrong."""

import itertools
import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from nemo_fp8rl.algorithms.gates import AGREEMENT, GATED, GateConfig, GateStop, apply_gates, check_gates
from nemo_fp8rl.algorithms.metric_names import METRICS
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.common.errors import UserError

MULT = GateConfig("token_mult_prob_error", 1.05, "warn")
KL = GateConfig("gen_kl_error", 0.015, "stop")


def test_a_gate_trips_above_its_limit_only():
    above = math.nextafter(1.05, 2)
    for value, trips in ((1.0, False), (1.05, False), (above, True), (math.inf, True)):
        assert len(apply_gates([MULT], {"token_mult_prob_error": value})[1]) == trips


def test_a_metric_that_is_nan_trips_every_gate_on_it():
    gates = [MULT, GateConfig("token_mult_prob_error", 2.0, "skip_step"), KL]
    skip, tripped = apply_gates(gates, {"token_mult_prob_error": math.nan, "gen_kl_error": 0.0})
    assert skip
    assert tripped == [
        "token_mult_prob_error is nan, its gate allows at most 1.05 (warn)",
        "token_mult_prob_error is nan, its gate allows at most 2 (skip_step)",
    ]


def test_a_gate_says_metric_value_limit_and_action():
    gates = [GateConfig("gen_kl_error", 0.01, "warn"), KL]
    said = [f"gen_kl_error is 0.0231, its gate allows at most {end}" for end in ("0.01 (warn)", "0.015 (stop)")]
    assert apply_gates(gates[:1], {"gen_kl_error": 0.0231}) == (False, said[:1])
    with pytest.raises(GateStop) as stopped:
        apply_gates(gates, {"gen_kl_error": 0.0231})
    assert str(stopped.value) == "; ".join(said)


@pytest.mark.parametrize("order", itertools.permutations(["warn", "skip_step", "stop"]))
def test_stop_wins_over_skip_step_over_warn(order):
    def skips(*actions):
        return apply_gates([GateConfig("gen_kl_error", 0.1, action) for action in actions], {"gen_kl_error": 1.0})[0]

    with pytest.raises(GateStop):
        skips(*order)
    assert skips(*(action for action in order if action != "stop"))
    assert not skips("warn")


def test_where_nothing_trips_the_batch_is_trained_on():
    assert apply_gates([MULT, KL], {"token_mult_prob_error": 1.0, "gen_kl_error": 0.0}) == (False, [])


def test_all_metrics_but_those_that_grow_with_agreement_can_be_gated():
    generator = torch.Generator().manual_seed(0)
    gen, mask = -torch.rand(4, 9, generator=generator), torch.ones(4, 9)
    agree = mismatch_metrics(gen, gen, mask)
    differ = mismatch_metrics(gen + torch.randn(4, 9, generator=generator), gen, mask)
    assert all(differ[metric] < agree[metric] for metric in AGREEMENT)
    assert set(GATED) | set(AGREEMENT) == set(METRICS) == set(agree)
    gates = [GateConfig(metric, 1.0, "warn") for metric in GATED]
    check_gates(gates)
    apply_gates(gates, agree)


@pytest.mark.parametrize(
    ("gate", "why"),
    [
        (
            GateConfig("gen_kl", 0.1, "warn"),
            r"nemo_fp8rl\.gates\[1\]\.metric='gen_kl' is none of token_mult_prob_error,",
        ),
        (GateConfig("ess", 0.5, "warn"), r"nemo_fp8rl\.gates\[1\]\.metric=ess grows with agreement"),
        (GateConfig("k3_kl", -0.1, "warn"), r"nemo_fp8rl\.gates\[1\]\.max=-0.1 must be a finite number of 0 or more"),
        (GateConfig("k3_kl", math.nan, "warn"), r"nemo_fp8rl\.gates\[1\]\.max=nan"),
        (GateConfig("k3_kl", math.inf, "warn"), r"nemo_fp8rl\.gates\[1\]\.max=inf"),
        (GateConfig("k3_kl", 0.1, "halt"), r"nemo_fp8rl\.gates\[1\]\.action='halt' is none of warn, skip_step, stop"),
        (GateConfig("gen_kl_error", 0.5, "stop"), r"nemo_fp8rl\.gates\[1\] repeats nemo_fp8rl\.gates\[0\]"),
    ],
)
def test_a_wrong_gate_is_refused_by_its_place(gate, why):
    with pytest.raises(UserError, match=why):
        check_gates([KL, gate])


def test_one_metric_may_have_a_gate_for_each_action():
    check_gates([GateConfig("gen_kl_error", limit, action) for limit, action in ((0.01, "warn"), (0.1, "stop"))])


def test_a_recipe_may_not_give_other_keys():
    read = TypeAdapter(GateConfig).validate_python
    assert read({"metric": "gen_kl_error", "max": 0.015, "action": "stop"}) == KL
    with pytest.raises(ValidationError, match="min"):
        read({"metric": "gen_kl_error", "max": 0.015, "action": "stop", "min": 0.0})
