"""Which runs are said to learn nothing, and why."""

import pytest

from nemo_fp8rl.data.rewards.answer_form import has_answer
from nemo_fp8rl.run.learning_signal import LearningWatch, count_without_signal, explain_no_signal

RECIPE = {
    "policy.generation.max_new_tokens": 5, "policy.max_total_sequence_length": 96, "policy.generation.top_k": 1,
    "data.default.env_name": "math",
}  # fmt: skip


def step(number: int = 1, **metrics: float) -> dict[str, float]:
    usual = {"reward": 0.5, "frac_reward_zero_std": 0.2, "truncation_rate": 0.0, "frac_identical_answers": 0.0}
    return {"step": number} | {f"train/{name}": value for name, value in (usual | metrics).items()}


EQUAL = {"frac_reward_zero_std": 1.0}


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (EQUAL | {"frac_identical_answers": 1.0, "truncation_rate": 1.0}, "the answers to a prompt were all the same"),
        ({"truncation_rate": 1.0}, "cut off before its end: raise policy.generation.max_new_tokens=5 and"),
        (EQUAL | {"reward": 0.0, "frac_answer_not_found": 1.0}, "found no answer in any text (data.default.env_name="),
        (EQUAL | {"reward": 0.0, "frac_answer_not_found": 0.5}, "every reward was 0"),
        (EQUAL | {"reward": 0.0}, "every reward was 0"),
        (EQUAL | {"reward": 1.0}, "the prompts are too easy"),
        (EQUAL, "the rewards of every group were all equal"),
    ],
)
def test_three_steps_that_teach_nothing_have_a_reason(metrics, reason):
    assert reason in explain_no_signal([step(**metrics)] * 3, RECIPE)
    assert explain_no_signal([step(**metrics)] * 2, RECIPE) == ""
    assert explain_no_signal([step(0, **metrics), *[step(**metrics)] * 2], RECIPE) == ""
    assert explain_no_signal([step(**metrics), step(), step(**metrics)], RECIPE) == ""
    assert explain_no_signal([step(), *[step(**metrics)] * 3], {}) != ""


@pytest.mark.parametrize("metrics", [{}, {"reward": 0.0}, {"truncation_rate": 0.99}, {"frac_reward_zero_std": 0.99}])
def test_a_run_that_may_learn_is_not_warned_about(metrics):
    assert explain_no_signal([step(**metrics)] * 9, RECIPE) == ""


def test_reinforce_without_a_baseline_compares_over_the_batch():
    recipe = {"grpo.adv_estimator.name": "reinforce_plus_plus", "grpo.adv_estimator.minus_baseline": False}
    mixed = step(**EQUAL, **{"baseline_reward/pct_0": 50.0, "baseline_reward/pct_1": 50.0})
    assert explain_no_signal([mixed] * 3, recipe) == ""
    assert explain_no_signal([mixed] * 3, recipe | {"grpo.adv_estimator.minus_baseline": True}) != ""
    wrong = step(reward=0.0, **EQUAL, **{"baseline_reward/pct_0": 100.0, "baseline_reward/pct_1": 0.0})
    assert "every reward was 0" in explain_no_signal([wrong] * 3, recipe)


def test_a_log_of_nemo_rl_is_judged_by_its_own_names():
    zero = {"step": 1, "train/reward": 0.0, "train/baseline_reward/pct_0": 100.0, "train/baseline_reward/pct_1": 0.0}
    assert "every reward was 0" in explain_no_signal([zero] * 3, {})
    loo = zero | {"train/reward": 0.5}  # of two answers, one right: the mean of the other is 0 or 1
    assert explain_no_signal([loo | {"train/baseline_reward/pct_0": 50.0}] * 3, {}) == ""
    assert count_without_signal([zero, loo, zero]) == 2


def test_a_reason_is_given_once_and_another_one_again():
    watch = LearningWatch([], RECIPE)
    said = [watch.look(number, step(number, reward=0.0, **EQUAL)) for number in range(1, 7)]
    said += [watch.look(number, step(number, reward=1.0, **EQUAL)) for number in range(7, 12)]
    assert [text.partition(":")[0] for text in said if text] == ["step 3", "step 7", "step 9"]
    assert "too hard" in said[2] and "all equal" in said[6] and "too easy" in said[8]


def test_a_resumed_run_counts_the_steps_before():
    watch = LearningWatch([step(1, **EQUAL), step(2, **EQUAL)], RECIPE)
    assert watch.look(3, step(3, **EQUAL)).startswith("step 3: in the last 3 steps")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("the answer is 72", True), ("\\boxed{x}", True), ("$x$", True), ("Answer: x", True)),
        *(("I do not know", False), ("", False), ("<think>it may be 72", False), ("<think>72</think> well", False)),
    ],
)
def test_a_text_without_a_number_or_latex_has_no_mathematical_answer(text, found):
    assert has_answer(text, ("72",)) is found
    assert has_answer(text, ("72", "Paris")) is (found or text in ("I do not know", "<think>72</think> well"))


def test_what_has_an_answer_is_what_math_verify_reads():
    math_verify = pytest.importorskip("math_verify")
    for text in ("the answer is 72", "\\boxed{x}", "$x$", "I do not know", "", "Answer: A", "x = 3/4", "1,000"):
        assert has_answer(text, ("72",)) >= bool(math_verify.parse(text, parsing_timeout=None))
