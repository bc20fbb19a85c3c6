"""The tokens that top-k and top-p select for sampling, as vLLM's sampler selects them on a CPU.

On a GPU vLLM 0.32 selects exactly k tokens (vllm/v1/sample/ops/topk_topp_triton.py): it drops some of the tokens that
tie with the k-th, and this module keeps all of them. Its kernel decides which, so the trainer cannot follow; the
trainer's log-probs are then lower, by the share of the ties that the engine dropped.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenFilter(NamedTuple):
    """The sampling limits of an engine; False if they select all tokens.

    top_k:  None for all tokens
    top_p:  1 for all tokens
    """

    top_k: int | None
    top_p: float

    def __bool__(self) -> bool:
        return self.top_k is not None or self.top_p < 1


def filter_logits(logits: Tensor, targets: Tensor, token_filter: TokenFilter) -> Tensor:
    """Return the logits, float32 [N, V], with -inf at tokens that cannot be sampled, except at `targets`, int64 [N].

    Top-k is first and keeps ties of the k-th. Top-p follows, on the softmax of the remaining tokens: it drops tokens
    from the least likely on, as long as their probabilities add up to at most 1 - p
    (vllm/v1/sample/ops/topk_topp_sampler.py). A target was sampled, so it was in the engine's set; where rounding puts
    it just outside the trainer's set, its probability must not become 0.
    """
    ordered, order = logits.sort(-1)
    if token_filter.top_k is not None and token_filter.top_k < logits.size(-1):
        ordered = ordered.masked_fill(ordered < ordered[:, -token_filter.top_k, None], -torch.inf)
    if token_filter.top_p < 1:
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - token_filter.top_p
        outside[:, -1] = False
        ordered = ordered.masked_fill(outside, -torch.inf)
    selected = torch.empty_like(logits).scatter_(-1, order, ordered)
    return selected.scatter_(-1, targets[:, None], logits.gather(-1, targets[:, None]))
