"""How far the trainer and the engine disagree on the tokens that the engine sampled. Names and formulas are NeMo RL's.

With l = prev_logprobs - generation_logprobs (trainer minus engine):

    token_mult_prob_error        mean exp|l|                   1 is agreement; NVIDIA accepts < 1.03 to 1.05
    gen_kl_error                 mean e^l - l - 1              k3 estimate of KL(engine || trainer)
    policy_kl_error              mean e^-l + l - 1             the same with the roles exchanged
    js_divergence_error          k3 estimates against the mixture, halved
    sampling_importance_ratio    mean e^l
    max_logprob_error            max |l|                       ours
    exact_logprob_fraction       mean [l == 0]                 ours: tokens on which both sides agree to the bit
"""

import torch
from torch import Tensor


def mismatch_metrics(prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Means over the tokens of the mask; all arguments [B, T]. Padding is never read."""
    inside = mask > 0
    prev, gen = prev_logprobs[inside].double(), generation_logprobs[inside].double()
    if not len(prev):
        raise ValueError("mismatch_metrics: the mask selects no token")
    log_ratio = prev - gen
    log_mixture = torch.logaddexp(prev, gen) - torch.log(torch.tensor(2.0, dtype=torch.float64))
    to_mixture = 0.5 * (_k3(prev - log_mixture) + _k3(gen - log_mixture))
    means = {
        "token_mult_prob_error": log_ratio.abs().exp().mean(),
        "gen_kl_error": _k3(log_ratio).mean(),
        "policy_kl_error": _k3(-log_ratio).mean(),
        "js_divergence_error": to_mixture.mean(),
        "sampling_importance_ratio": log_ratio.exp().mean(),
        "max_logprob_error": log_ratio.abs().max(),
        "exact_logprob_fraction": (log_ratio == 0).double().mean(),
    }
    return {name: float(value) for name, value in means.items()}


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio
