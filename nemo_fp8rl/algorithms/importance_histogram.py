"""Histogram of the importance weights rho = e^l of a step's tokens, l = prev_logprobs - generation_logprobs."""

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.importance_bins import EDGES, Bin


@torch.no_grad()
def log_weight_histogram(prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor) -> list[Bin]:
    """Return the bins that hold tokens, in order; a token without a finite l is in no bin.

    prev_logprobs, generation_logprobs, mask:  [B, T]; nothing is read outside the mask
    """
    inside = mask > 0
    log_ratio = prev_logprobs[inside] - generation_logprobs[inside]
    log_ratio = log_ratio[log_ratio.isfinite()]
    counts = torch.bincount(torch.bucketize(log_ratio, torch.tensor(EDGES)), minlength=len(EDGES) + 1).tolist()
    edges = [None, *(float(f"{edge:.6g}") for edge in EDGES), None]
    return [(edges[i], edges[i + 1], count) for i, count in enumerate(counts) if count]
