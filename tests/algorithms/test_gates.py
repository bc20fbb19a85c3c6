"""Gates: what trips, what wins, and which entry of the recipe is named when it is wrong."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from nemo_fp8rl.algorithms.gates import (
    AGREEMENT,
    GATED,
    GateConfig,
    GateStop,
    alarm,
    apply_gates,
    check_gates,
    explained_mismatch,
)
from nemo_fp8rl.algorithms.metric_names import METRICS, SHARPNESS
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
    assert set(METRICS) == set(agree)
    assert set(GATED) | set(AGREEMENT) == {*METRICS, *SHARPNESS}
    gates = [GateConfig(metric, 1.0, "warn") for metric in GATED]
    check_gates(gates, 1)
    apply_gates(gates, agree)


def test_a_gate_on_sharpness_trips_only_where_it_is_measured():
    gate = GateConfig("sharpness", 0.5, "skip_step")
    assert apply_gates([gate], {"gen_kl_error": 1.0}) == (False, [])
    assert apply_gates([gate], {"sharpness": 0.5}) == (False, [])
    assert apply_gates([gate], {"sharpness": 0.75}) == (
        True,
        ["sharpness is 0.75, its gate allows at most 0.5 (skip_step)"],
    )


@pytest.mark.parametrize("metric", SHARPNESS)
def test_a_gate_on_sharpness_needs_a_period(metric):
    with pytest.raises(UserError, match=rf"gates\[1\].metric={metric} is never measured with .*period=0: set"):
        check_gates([KL, GateConfig(metric, 0.5, "stop")], 0)


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
        check_gates([KL, gate], 1)


def test_one_metric_may_have_a_gate_for_each_action():
    check_gates([GateConfig("gen_kl_error", limit, action) for limit, action in ((0.01, "warn"), (0.1, "stop"))], 0)


def test_a_recipe_may_not_give_other_keys():
    read = TypeAdapter(GateConfig).validate_python
    assert read({"metric": "gen_kl_error", "max": 0.015, "action": "stop"}) == KL
    with pytest.raises(ValidationError, match="min"):
        read({"metric": "gen_kl_error", "max": 0.015, "action": "stop", "min": 0.0})


# The alarm

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def measured() -> Iterator[tuple[dict[str, Any], float]]:
    """Yield (arguments of `explained_mismatch`, largest mismatch of a step) for every run of docs/results.md."""
    for path in RESULTS.glob("mismatch_*.json"):
        content = json.loads(path.read_text())
        for row in content["results"]:
            kv = row.get("kv") or "none"
            aligned = row["align"] == "vllm" and kv != "rollout"
            facts = {"aligned": aligned, "fp8_cache": kv != "none", "experts": content["family"] == "qwen3_moe"}
            yield {"flow": row["flow"], **facts}, row["worst_step"]
    for name, row in json.loads((RESULTS / "loop_h200.json").read_text())["runs"].items():
        yield {"flow": name.partition(",")[0], "fp8_cache": "KV" in name}, row["worst_step"]


def test_no_run_of_the_results_is_alarming():
    runs = list(measured())
    assert {run["flow"] for run, _ in runs} == {"bf16", "fp8_e2e", "fp8_rollout"}
    assert {run.get("aligned", False) for run, _ in runs} == {run["fp8_cache"] for run, _ in runs} == {True, False}
    for run, worst in runs:
        assert alarm({"token_mult_prob_error": worst}, explained_mismatch(**run)) == "", run


@pytest.mark.parametrize("flow", ["bf16", "fp8_e2e", "fp8_rollout"])
@pytest.mark.parametrize("value", [1.2, 46.0, math.inf, math.nan])
def test_a_mismatch_that_no_rounding_explains_is_alarming(flow, value):
    said = alarm({"token_mult_prob_error": value}, explained_mismatch(flow))
    assert f"MISMATCH: token_mult_prob_error is {value:.4g}" in said


def test_what_lets_both_sides_differ_more_raises_the_limit():
    plain = explained_mismatch("fp8_e2e")
    assert explained_mismatch("fp8_e2e", aligned=True) < explained_mismatch("bf16") < plain
    assert plain < explained_mismatch("fp8_e2e", fp8_cache=True) < explained_mismatch("fp8_rollout")
    for more in ({"experts": True}, {"temperature": 0.5}, {"asynchronous": True}):
        assert explained_mismatch("fp8_e2e", **more) > plain
    assert explained_mismatch("fp8_e2e", temperature=0.0) == explained_mismatch("fp8_e2e", temperature=2.0) == plain
    assert explained_mismatch("fp8_rollout", aligned=True) == explained_mismatch("fp8_rollout")


def test_without_a_comparison_there_is_no_alarm():
    assert alarm({}, 1.0) == ""


@pytest.mark.parametrize(
    ("flow", "measured"),
    [("mxfp8_rollout", 1.022), ("nvfp4_a16_rollout", 1.14), ("nvfp4_rollout", 1.25), ("nvfp4_e2e", 1.01)],
)
def test_the_other_formats_explain_what_the_tiny_model_measures_and_not_ten_times_that(flow, measured):
    explained = explained_mismatch(flow)
    assert measured < explained < 1 + 15 * (measured - 1)


def test_fewer_bits_explain_more():
    sides = [[explained_mismatch(f"{name}_{side}") for side in ("e2e", "rollout")] for name in ("mxfp8", "nvfp4")]
    assert all(e2e < rollout for e2e, rollout in sides) and sides[0] < sides[1]
    assert explained_mismatch("nvfp4_a16_rollout") < explained_mismatch("nvfp4_rollout")
    for name in ("mxfp8", "nvfp4", "nvfp4_a16"):
        assert explained_mismatch(f"{name}_e2e", aligned=True) == explained_mismatch("fp8_e2e", aligned=True)
        assert explained_mismatch(f"{name}_rollout", aligned=True) == explained_mismatch(f"{name}_rollout")
