"""Finds the reason why a run has no gradient to learn from, in the metrics of its last steps. Needs no torch.

GRPO compares the answers to one prompt with each other: where all of them have the same reward, there is no gradient.
Such a run looks healthy, with a loss of 0 and without an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE = 3
"""Steps in a row without a signal, before a run is called one that does not learn."""
MOSTLY = 0.5
"""Greedy answers are equal in more groups than this, not in all: two tokens may have the same logit."""
EQUAL_REWARDS, EQUAL_ANSWERS, NO_ANSWER = "frac_reward_zero_std", "frac_identical_answers", "frac_answer_not_found"
"""TRL's name for the share of groups whose rewards are all equal; our names for the share of groups whose answers are
all the same tokens, and for the share of answers in which the verifier finds nothing to compare.
"""

Row = Mapping[str, float]


class LearningWatch:
    """Says once why a run learns nothing, while it goes on."""

    def __init__(self, rows: Sequence[Row], recipe: Mapping[str, Any]) -> None:
        """rows: of the steps before; recipe: see `explain_no_signal`"""
        self.rows, self.recipe = list(rows)[-PATIENCE:], recipe
        self.last_reason = ""

    def look(self, step: int, metrics: Row) -> str:
        """Return a sentence about the last steps, "" for none and where it was said before."""
        self.rows = [*self.rows, {"step": step, **metrics}][-PATIENCE:]
        reason = explain_no_signal(self.rows, self.recipe)
        if not reason or reason == self.last_reason:
            return ""
        self.last_reason = reason
        return f"step {step}: {reason}"


def explain_no_signal(rows: Sequence[Row], recipe: Mapping[str, Any]) -> str:
    """Return a sentence about why the last PATIENCE steps taught nothing; "" where they did, or are too few.

    rows:    metrics of steps, with the prefix train/
    recipe:  flat, {"policy.generation.top_k": 1}; names the keys to change with their values
    """
    rows = [row for row in rows if row.get("step", 1) > 0][-PATIENCE:]
    if len(rows) < PATIENCE:
        return ""

    def always(name: str, value: float) -> bool:
        return all(row.get(f"train/{name}") == value for row in rows)

    by_batch = recipe.get("grpo.adv_estimator.minus_baseline") is False  # rewards are not compared within groups
    by_batch &= recipe.get("grpo.adv_estimator.name") == "reinforce_plus_plus"
    has_no_signal = all(_is_all_0_or_1(row) if by_batch else _has_equal_rewards(row) for row in rows)
    if has_no_signal and all(row.get(f"train/{EQUAL_ANSWERS}", 0) > MOSTLY for row in rows):
        keys = _keys(recipe, *(f"policy.generation.{name}" for name in ("temperature", "top_k", "top_p")))
        reason = f"the answers to a prompt were all the same, which gives no gradient: sample more freely ({keys})"
    elif always("truncation_rate", 1):
        reason = (
            f"every answer was cut off before its end: raise {_keys(recipe, 'policy.generation.max_new_tokens')} and "
            f"{_keys(recipe, 'policy.max_total_sequence_length')}, or begin with a model that ends its answers"
        )
    elif always(NO_ANSWER, 1) and always("reward", 0):
        reason = (
            f"the verifier found no answer in any text ({_keys(recipe, 'data.default.env_name')}): ask for its form of "
            "answer in the prompt, or take another verifier"
        )
    elif has_no_signal and always("reward", 0):
        reason = (
            "every reward was 0, which gives no gradient: the prompts are too hard for the model (warm it up with "
            "`nemo-fp8rl sft`), or its answers have another form than the verifier expects "
            f"({_keys(recipe, 'data.default.env_name')}); samples.jsonl shows some"
        )
    elif has_no_signal and always("reward", 1):
        reason = "every reward was 1, which gives no gradient: the prompts are too easy for the model"
    elif has_no_signal:
        reason = (
            "the rewards of every group were all equal, which gives no gradient: give prompts that the model solves "
            "sometimes, or more answers to each (grpo.num_generations_per_prompt)"
        )
    else:
        return ""
    return f"in the last {PATIENCE} steps {reason}"


def count_without_signal(rows: Sequence[Row]) -> int:
    """Return in how many steps the rewards of every group were all equal."""
    return sum(_has_equal_rewards(row) for row in rows)


def _has_equal_rewards(row: Row) -> bool:
    """Return whether no group gives a gradient. NeMo RL's logs tell it only where all rewards are 0, or all 1."""
    return row[f"train/{EQUAL_REWARDS}"] == 1 if f"train/{EQUAL_REWARDS}" in row else _is_all_0_or_1(row)


def _is_all_0_or_1(row: Row) -> bool:
    shares = (row.get("train/baseline_reward/pct_0"), row.get("train/baseline_reward/pct_1"))
    return row.get("train/reward") in (0, 1) and 100 in shares


def _keys(recipe: Mapping[str, Any], *names: str) -> str:
    return ", ".join(f"{name}={recipe[name]}" if name in recipe else name for name in names)
