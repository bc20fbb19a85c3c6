"""How the importance weights rho = e^l of a step's tokens are distributed, l = prev_logprobs - generation_logprobs.

Bins are of l, evenly spaced in log |l| on both sides of 0, four a decade from 1e-4 to 10: sides that agree differ by
1e-4 and sides that do not by 1, and one histogram has to show both. The bin in the middle holds what agrees better.
"""

import torch
from torch import Tensor

SMALLEST, DECADES, BINS_A_DECADE = -4, 5, 4
POSITIVE = tuple(10 ** (SMALLEST + k / BINS_A_DECADE) for k in range(DECADES * BINS_A_DECADE + 1))
EDGES = (*(-edge for edge in reversed(POSITIVE)), *POSITIVE)

Bin = tuple[float | None, float | None, int]
"""l above the first, up to the second, None without end; tokens."""


@torch.no_grad()
def log_weight_histogram(prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor) -> list[Bin]:
    """The bins that hold tokens, in order. All arguments [B, T]; nothing is read outside the mask, and tokens without a
    finite l are in no bin.
    """
    inside = mask > 0
    log_ratio = prev_logprobs[inside] - generation_logprobs[inside]
    log_ratio = log_ratio[log_ratio.isfinite()]
    counts = torch.bincount(torch.bucketize(log_ratio, torch.tensor(EDGES)), minlength=len(EDGES) + 1).tolist()
    edges = [None, *(float(f"{edge:.6g}") for edge in EDGES), None]
    return [(edges[i], edges[i + 1], count) for i, count in enumerate(counts) if count]
