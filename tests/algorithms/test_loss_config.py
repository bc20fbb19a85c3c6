"""The `loss_fn` block: NeMo RL's keys and defaults, what contradicts what, and what its keys mean as a correction."""

import math
from dataclasses import asdict

import pytest

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig, Rule
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import read_block
from tests.algorithms.losses import make_loss

NEMO_RL = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
"""ClippedPGLossConfig, nemo_rl/algorithms/loss/loss_functions.py."""
OURS = {
    "loss_agg_mode": None,
    "loss_scale_factor": None,
    "entropy_coefficient": 0.0,
    "ratio_clip_adaptive": False,
    "off_policy_mask_threshold": None,
}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}


def truncated(kind: str | None, high: float | None = None, low: float | None = None, **more) -> dict:
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
        **more,
    }


def test_keys_and_defaults_are_nemo_rls_and_five_of_ours():
    assert asdict(LossConfig()) == NEMO_RL | OURS


@pytest.mark.parametrize(
    "keys",
    [
        {},
        GSPO,
        GSPO | {"loss_agg_mode": "seq-mean-token-mean"},
        GSPO | {"loss_agg_mode": "seq-mean-token-sum"},
        GSPO | truncated("tis", 2.0),
        GSPO | truncated("icepop", 5.0, 0.5),
        {"loss_agg_mode": "token-mean"},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 4096.0, "token_level_loss": False},
        {"use_cispo": True, "ratio_clip_max": 5.0},
        {"use_cispo": True} | truncated("tis", 2.0),
        {"disable_ppo_ratio": True},
        {"force_on_policy_ratio": True},
        {"ratio_clip_c": 3.0},
        {"ratio_clip_min": 0.0, "ratio_clip_max": 0.0},
        {"ratio_clip_min": 1.0},
        {"kl_input_clamp_value": None, "kl_output_clamp_value": None},
        {"reference_policy_kl_penalty": 0},
        {"entropy_coefficient": -0.01},
        {"ratio_clip_adaptive": True, "ratio_clip_c": 3.0} | truncated("tis", 2.0),
        {"off_policy_mask_threshold": 0.5, "force_on_policy_ratio": True},
        {"off_policy_mask_threshold": 0.5} | GSPO,
        truncated(None),
        truncated("tis", 2.0),
        truncated("tis", 2.0, 0.0),
        truncated("tis", 2.0, 2.0),
        truncated("seq-mask-tis", 1.002, 0.999),
    ],
)
def test_what_nemo_rl_and_the_papers_combine_is_accepted(keys):
    assert make_loss(keys).cfg == read_block(keys, LossConfig, "loss_fn.") == LossConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"ratio_clip_min": -0.1}, ["ratio_clip_min=-0.1", "0..1"]),
        ({"ratio_clip_min": 1.1}, ["ratio_clip_min=1.1"]),
        ({"ratio_clip_min": math.nan}, ["ratio_clip_min=nan"]),
        ({"ratio_clip_max": -0.1}, ["ratio_clip_max=-0.1", "0 or more"]),
        ({"ratio_clip_max": math.nan}, ["ratio_clip_max=nan"]),
        ({"ratio_clip_max": math.inf}, ["ratio_clip_max=inf"]),
        ({"reference_policy_kl_penalty": -0.1}, ["reference_policy_kl_penalty=-0.1"]),
        ({"reference_policy_kl_penalty": math.nan}, ["reference_policy_kl_penalty=nan"]),
        ({"positive_example_nll_weight": -1.0}, ["positive_example_nll_weight=-1.0"]),
        ({"entropy_coefficient": math.nan}, ["entropy_coefficient=nan"]),
        ({"kl_input_clamp_value": 0.0}, ["kl_input_clamp_value=0.0", "null clamps nothing"]),
        ({"kl_output_clamp_value": -1.0}, ["kl_output_clamp_value=-1.0"]),
        ({"ratio_clip_c": 1.0}, ["ratio_clip_c=1.0", "above 1"]),
        ({"ratio_clip_c": math.inf}, ["ratio_clip_c=inf"]),
        ({"reference_policy_kl_type": "k4"}, ["reference_policy_kl_type='k4'", "k1, k2, k3"]),
        ({"loss_agg_mode": "mean"}, ["loss_agg_mode='mean'", "token-mean", "seq-mean-token-sum-norm"]),
        # Aggregation
        ({"loss_agg_mode": "seq-mean-token-mean"}, ["loss_agg_mode=", "set token_level_loss=false"]),
        ({"loss_agg_mode": "seq-mean-token-sum"}, ["loss_agg_mode=", "set token_level_loss=false"]),
        (
            {"loss_agg_mode": "token-mean", "token_level_loss": False},
            ["loss_agg_mode=token-mean", "set token_level_loss=true"],
        ),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm", "token_level_loss": False},
            ["loss_scale_factor", "loss_agg_mode=seq-mean-token-sum-norm"],
        ),
        ({"loss_scale_factor": 10.0}, ["loss_scale_factor=10.0", "loss_agg_mode"]),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm", "token_level_loss": False, "loss_scale_factor": 0.0},
            ["loss_scale_factor=0.0", "above 0"],
        ),
        # Modes of the ratio
        ({"sequence_level_importance_ratios": True}, ["sequence_level_importance_ratios", "token_level_loss=true"]),
        ({"disable_ppo_ratio": True, "force_on_policy_ratio": True}, ["disable_ppo_ratio", "force_on_policy_ratio"]),
        ({"use_cispo": True, "disable_ppo_ratio": True}, ["use_cispo", "disable_ppo_ratio"]),
        ({"use_cispo": True, "force_on_policy_ratio": True}, ["use_cispo", "force_on_policy_ratio"]),
        ({"use_cispo": True, **GSPO}, ["use_cispo", "sequence_level_importance_ratios"]),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, ["use_cispo", "ratio_clip_c=null"]),
        ({"use_cispo": True, "token_level_loss": False}, ["use_cispo", "token_level_loss=false"]),
        *(
            (
                {
                    "ratio_clip_adaptive": True,
                    name: True,
                    "token_level_loss": name != "sequence_level_importance_ratios",
                },
                ["ratio_clip_adaptive", name],
            )
            for name in (
                *("disable_ppo_ratio", "force_on_policy_ratio", "use_cispo"),
                "sequence_level_importance_ratios",
            )
        ),
        *(
            ({"off_policy_mask_threshold": bad}, [f"off_policy_mask_threshold={bad}", "above 0"])
            for bad in (0.0, -0.5, math.nan, math.inf)
        ),
        # Truncation
        ({"truncated_importance_sampling_type": "tis"}, ["use_importance_sampling_correction=true"]),
        (truncated("clip", 2.0), ["truncated_importance_sampling_type='clip'", "tis, icepop, seq-mask-tis"]),
        (truncated("tis"), ["truncated_importance_sampling_type=tis", "truncated_importance_sampling_ratio above 0"]),
        (truncated("tis", 0.0), ["truncated_importance_sampling_ratio above 0", "got 0.0"]),
        (truncated("tis", math.nan), ["truncated_importance_sampling_ratio above 0"]),
        (truncated("tis", 2.0, 3.0), ["truncated_importance_sampling_ratio_min must be <= truncated", "3.0 and 2.0"]),
        (truncated("tis", 2.0, -0.5), ["truncated_importance_sampling_ratio_min", "-0.5"]),
        (truncated("tis", 2.0, math.nan), ["truncated_importance_sampling_ratio_min", "nan"]),
        (truncated("icepop", 5.0), ["truncated_importance_sampling_type=icepop", "ratio_min"]),
        (truncated("seq-mask-tis", 1.002), ["truncated_importance_sampling_type=seq-mask-tis", "ratio_min"]),
        (
            truncated("seq-mask-tis", 1.002, 0.999, **GSPO),
            ["seq-mask-tis", "sequence_level_importance_ratios", "use tis or icepop"],
        ),
        (truncated(None, 2.0), ["truncated_importance_sampling_ratio", "truncated_importance_sampling_type"]),
        (truncated(None, None, 0.5), ["truncated_importance_sampling_ratio_min", "truncated_importance_sampling_type"]),
        ({"truncated_importance_sampling_ratio": 2.0}, ["truncated_importance_sampling_ratio"]),
    ],
)
def test_keys_that_contradict_each_other_are_named_with_the_fix(keys, named):
    for make in (make_loss, lambda keys: LossConfig(**keys).check()):
        with pytest.raises(UserError) as error:
            make(keys)
        assert str(error.value).startswith("loss_fn.")
        assert [part for part in named if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ratio_clip": 0.2}, r"unknown config key loss_fn\.ratio_clip; did you mean loss_fn\.ratio_clip_c\?"),
        ({"zeta": 1}, r"unknown config key loss_fn\.zeta; known here: ratio_clip_min, "),
        ({"ratio_clip_min": -0.1}, r"loss_fn\.ratio_clip_min=-0\.1 must lie in 0\.\.1: 0\.2 is common"),
        ({"reference_policy_kl_type": "k4"}, r"loss_fn\.reference_policy_kl_type='k4'.*'k1', 'k2' or 'k3'"),
        ({"ratio_clip_max": "wide"}, r"loss_fn\.ratio_clip_max='wide': input should be a number"),
    ],
)
def test_a_block_is_read_as_in_a_recipe(keys, message):
    with pytest.raises(UserError, match=message):
        read_block(keys, LossConfig, "loss_fn.")


@pytest.mark.parametrize("correction", [{"preset": "tis"}, CorrectionConfig()])
def test_two_corrections_contradict_each_other(correction):
    with pytest.raises(UserError, match=r"nemo_fp8rl\.correction .*use_importance_sampling_correction"):
        make_loss(truncated("tis", 2.0), correction)


def test_bypass_contradicts_a_forced_ratio():
    with pytest.raises(UserError, match=r"nemo_fp8rl\.correction\.bypass .*force_on_policy_ratio"):
        make_loss({"force_on_policy_ratio": True}, {"preset": "bypass"})
    with pytest.raises(UserError, match=r"bypass corrects by the ratio that loss_fn\.disable_ppo_ratio removes"):
        make_loss({"disable_ppo_ratio": True}, {"preset": "bypass"})


@pytest.mark.parametrize("correction", [None, {"preset": "is"}, {"preset": "seq-tis"}, {"preset": "bypass"}])
def test_qurls_clip_needs_a_truncated_weight_of_tokens(correction):
    with pytest.raises(UserError, match=r"ratio_clip_adaptive=true needs .*correction\.preset=tis"):
        make_loss({"ratio_clip_adaptive": True}, correction)


@pytest.mark.parametrize(
    ("keys", "meant"),
    [
        ({}, CorrectionConfig(weight="none", weight_max=None)),
        (GSPO, CorrectionConfig(weight="none", weight_max=None)),
        (truncated(None), CorrectionConfig(weight="token", weight_max=None)),
        (truncated(None, **GSPO), CorrectionConfig(weight="sequence", weight_max=None)),
        (truncated("tis", 2.0), CorrectionConfig(weight="token", weight_max=2.0)),
        (truncated("tis", 2.0, 0.5), CorrectionConfig(weight="token", weight_max=2.0, weight_min=0.5)),
        (truncated("tis", 2.0, 0.5, **GSPO), CorrectionConfig(weight="sequence", weight_max=2.0, weight_min=0.5)),
        (
            truncated("icepop", 5.0, 0.5),
            CorrectionConfig(weight="token", weight_max=None, reject=(Rule("token_k1", 5.0, 0.5),)),
        ),
        (
            truncated("icepop", 5.0, 0.5, **GSPO),
            CorrectionConfig(weight="sequence", weight_max=None, reject=(Rule("seq_sum_k1", 5.0, 0.5),)),
        ),
        (
            truncated("seq-mask-tis", 1.002, 0.999),
            CorrectionConfig(weight="token", weight_max=None, reject=(Rule("seq_mean_k1", 1.002, 0.999),)),
        ),
    ],
)
def test_nemo_rls_keys_mean_a_correction(keys, meant):
    assert make_loss(keys).correction == meant
    assert meant.denominator == "all"  # NeMo RL divides by all tokens, rejected ones too
