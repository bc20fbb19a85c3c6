"""Names of the mismatch metrics that `mismatch` computes, apart from it: a recipe is read without torch."""

DISAGREEMENT = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error")
"""NeMo RL's four, which `mismatch.disagreement` sums."""
METRICS = (
    *DISAGREEMENT,
    "max_logprob_error", "exact_logprob_fraction", "nonfinite_logprob_ratio",
    "kl", "k3_kl", "training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff",
    "chi2_token", "chi2_seq", "ess", "ess_seq", "probs_pearson_corr",
)  # fmt: skip
"""What `mismatch.MismatchSums.metrics` gives."""


def bucket_start(bucket: str) -> int:
    """Of a bucket of positions, such as the 2_3 of gen_kl_error/position_2_3: what they are sorted by."""
    return int(bucket.partition("_")[0])
