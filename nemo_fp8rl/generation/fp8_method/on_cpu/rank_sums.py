"""Sums over the tensor-parallel ranks of an engine on a CPU, rounded once, as on a single rank."""

import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)


def sum_over_ranks(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up the ranks' parts, float32, and round the sum to `dtype`; the parts themselves are not rounded."""
    return tensor_model_parallel_all_reduce(part).to(dtype)


def sum_exactly(part: Tensor, ranks: int) -> Tensor:
    """Add up the ranks' parts [tokens, r]; float64 travels as bits, because vLLM's sums do not know it."""
    if part.dtype is not torch.float64:
        return tensor_model_parallel_all_reduce(part)
    bits = part.contiguous().view(torch.float32)
    parts = tensor_model_parallel_all_gather(bits, dim=0).view(torch.float64)
    return parts.view(ranks, *part.shape).sum(0)


def keep_on_first_rank(whole: Tensor) -> Tensor:
    """Return `whole`, which every rank has, on the first rank and zeros on the others: vLLM adds them up."""
    return whole if get_tensor_model_parallel_rank() == 0 else torch.zeros_like(whole)
