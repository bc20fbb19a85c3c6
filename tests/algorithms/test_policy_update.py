"""Judging a batch whose tokens are of several versions of the weights."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.gates import GateConfig, GateStop
from nemo_fp8rl.algorithms.policy_update import check_versions, describe_overflows, judge_and_correct
from nemo_fp8rl.batch import Completion, Prompt, ScoredBatch, collate
from nemo_fp8rl.common.errors import StepRefused

NEWEST = 7
GATE = GateConfig("token_mult_prob_error", 1.01, "stop")


def answer(policy_version: int, *starts: tuple[int, int]) -> Completion:
    return Completion((4, 5, 6, 7), (-1.0, -1.0, -1.0, -1.0), "length", policy_version, version_starts=starts)


def batch_of(answers: list[Completion], far: float, newest_far: float = 0.0) -> ScoredBatch:
    """far: of the trainer's log-probs from the engine's, where a token is not of the newest version; newest_far: where
    it is.
    """
    prompts = [Prompt(i, "", "", (2, 3)) for i in range(len(answers))]
    rollout = collate(prompts, answers, 0, with_versions=True)
    is_newest = rollout.token_versions == NEWEST
    apart = torch.where(is_newest, newest_far, far) * rollout.token_mask
    zeros = torch.zeros(rollout.token_mask.shape)
    rewards = torch.zeros(len(answers))
    return ScoredBatch(
        **vars(rollout), rewards=rewards, prev_logprobs=rollout.generation_logprobs + apart, advantages=zeros
    )


def judge(batch: ScoredBatch, **options):
    return judge_and_correct(batch, batch.token_mask, (GATE,), None, trainer_version=NEWEST, **options)


def test_a_batch_has_the_version_of_each_token_and_of_each_prompt():
    batch = batch_of(
        [answer(7), answer(5, (0, 5), (1, 6), (3, 7)), replace(answer(6), token_ids=(4,), logprobs=())], 0.0
    )
    assert batch.token_versions.tolist() == [[7] * 6, [5, 5, 5, 6, 6, 7], [6, 6, 6, -1, -1, -1]]
    assert answer(5, (0, 5), (1, 6), (3, 7)).token_versions == (5, 6, 6, 7)
    assert answer(5).token_versions == (5, 5, 5, 5)


def test_metrics_tell_each_version_apart():
    judgement = judge(batch_of([answer(7), answer(5, (0, 5), (1, 6), (3, 7))], far=0.5))
    by_lag = judgement.mismatch_by_lag
    assert by_lag["token_mult_prob_error/version_lag_0"] == 1
    assert by_lag["exact_logprob_fraction/version_lag_0"] == 1
    for lag in (1, 2):
        assert by_lag[f"token_mult_prob_error/version_lag_{lag}"] == pytest.approx(2.718281828**0.5)
        assert by_lag[f"weight_mean/version_lag_{lag}"] == pytest.approx(2.718281828**0.5)
    assert [by_lag[f"token_share/version_lag_{lag}"] for lag in range(3)] == [5 / 8, 2 / 8, 1 / 8]
    assert judgement.batch.token_versions is None


def test_a_token_of_an_unknown_version_is_counted_as_such():
    batch = batch_of([answer(7), answer(7)], 0.0)
    versions = batch.token_versions.clone()
    versions[1] = -1
    by_lag = judge(replace(batch, token_versions=versions)).mismatch_by_lag
    assert by_lag["token_share/version_unknown"] == by_lag["token_share/version_lag_0"] == 0.5


def test_gates_and_the_strict_alarm_see_answers_of_the_newest_version_alone():
    older = [answer(7), answer(6), answer(6, (0, 6), (2, 7)), answer(6, (0, 7))]
    calm = judge(batch_of(older, far=0.5), explained=2.0, explained_newest=1.001)
    assert not calm.warnings and not calm.alarm
    with pytest.raises(GateStop, match="token_mult_prob_error"):
        judge(batch_of(older, far=0.0, newest_far=0.5))
    no_gate = judge_and_correct(
        *(batch := batch_of(older, 0.0, 0.5), batch.token_mask, (), None),
        explained=2.0,
        trainer_version=NEWEST,
        explained_newest=1.001,
    )
    assert "MISMATCH" in no_gate.alarm
    assert not judge(batch_of(older[1:], far=0.5), explained=2.0).alarm  # none is of the newest from its prompt on


def test_the_correction_weighs_each_token_by_itself():
    batch = batch_of([answer(5, (0, 5), (2, 7))], far=0.5)
    correction = CorrectionConfig(preset="tis").resolve()
    weights = judge_and_correct(
        batch, batch.token_mask, (), correction, trainer_version=NEWEST
    ).batch.importance_weights
    assert weights[0, 2:].tolist() == pytest.approx([2.718281828**0.5] * 2 + [1.0, 1.0])


def test_answers_that_are_too_old_or_of_a_version_to_come_are_refused():
    check_versions([answer(7), answer(5, (0, 6), (1, 7))], NEWEST, 2)
    with pytest.raises(StepRefused, match=r"versions \[5\]; the trainer is at 7"):
        check_versions([answer(5, (0, 6), (1, 7))], NEWEST, 1)
    with pytest.raises(StepRefused, match=r"versions \[8\]"):
        check_versions([answer(7, (0, 7), (1, 8))], NEWEST, 2)


def test_steps_that_overflow_float16_are_told_with_their_scale():
    taken, skipped = ({"loss_scale": 512.0, "overflow_ratio": share} for share in (0.0, 1.0))
    assert describe_overflows([]) == describe_overflows([{"loss": 1.0}]) == describe_overflows([taken]) == ""
    assert "1 of 2 optimizer steps were skipped" in (said := describe_overflows([taken, skipped]))
    assert "loss scale of 512;" in said
