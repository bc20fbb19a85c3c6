"""The tokens that top-k and top-p leave to sample from, as vLLM's sampler takes them on a CPU.

On a GPU vLLM 0.32 takes exactly k tokens (vllm/v1/sample/ops/topk_topp_triton.py): of those that tie with the k-th some
go, which here stay. Which ones is up to its kernel, so this is not followed; the trainer's log-probs are then lower, by
the share of the ties that the engine left out.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Restriction(NamedTuple):
    """top_k: None for all tokens. top_p: 1 for all."""

    top_k: int | None
    top_p: float

    def __bool__(self) -> bool:
        return self.top_k is not None or self.top_p < 1


def restricted(logits: Tensor, targets: Tensor, restriction: Restriction) -> Tensor:
    """Logits, float32 [N, V], with -inf at the tokens that are not sampled from; those of `targets`, int64 [N], stay.

    Top-k first (ties of the k-th stay), then top-p on the softmax of what is left: from the least likely on, tokens go
    as long as their probabilities add up to at most 1 - p (vllm/v1/sample/ops/topk_topp_sampler.py). A target was
    sampled, so the engine's set held it; where rounding puts it just outside the trainer's, its probability must not
    become 0.
    """
    ordered, order = logits.sort(-1)
    if restriction.top_k is not None and restriction.top_k < logits.size(-1):
        ordered = ordered.masked_fill(ordered < ordered[:, -restriction.top_k, None], -torch.inf)
    if restriction.top_p < 1:
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - restriction.top_p
        outside[:, -1] = False
        ordered = ordered.masked_fill(outside, -torch.inf)
    kept = torch.empty_like(logits).scatter_(-1, order, ordered)
    return kept.scatter_(-1, targets[:, None], logits.gather(-1, targets[:, None]))
