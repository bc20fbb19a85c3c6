"""Names of the mismatch metrics, apart from `mismatch`, which needs torch: a recipe is read without torch.

Readers of metrics.jsonl check names and values by the functions of this module.
"""

import re
from collections.abc import Iterable
from typing import Any

DISAGREEMENT = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error")
"""NeMo RL's four metrics, of `mismatch.sum_disagreement`."""
METRICS = (
    *DISAGREEMENT,
    "max_logprob_error", "exact_logprob_fraction", "nonfinite_logprob_ratio",
    "kl", "k3_kl", "training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff",
    "chi2_token", "chi2_seq", "ess", "ess_seq", "probs_pearson_corr",
)  # fmt: skip
"""Names of `mismatch.MismatchSums.metrics`."""
SHARPNESS = ("sharpness", "sharpness_last_token")
"""Names of `policy.sharpness.sharpness_metrics`, at the steps that nemo_fp8rl.sharpness measures."""
LARGEST = 1e100
"""Largest value of a metric; sums, squares and ranges of such values are finite, too."""
NUMBERED = re.compile(r"\d{1,15}(?=_|\Z)", re.ASCII)


def is_measured(value: Any) -> bool:
    """True for a finite number of at most LARGEST; text, true and false are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def sort_by_number(ends: Iterable[str]) -> list[str]:
    """Sort ends of metrics' names by their first number, such as the 2_3 of gen_kl_error/position_2_3 and the 7 of
    weight_error/layer_7. An end that does not begin with a number is left out.
    """
    starts = {end: int(found[0]) for end in ends if (found := NUMBERED.match(end))}
    return sorted(starts, key=lambda end: starts[end])
