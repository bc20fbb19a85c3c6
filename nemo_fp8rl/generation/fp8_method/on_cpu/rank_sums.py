"""Sums over the tensor-parallel ranks of an engine on a CPU, rounded once, as on a single rank."""

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce


def sum_over_ranks(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up the ranks' parts, float32, and round the sum to `dtype`; the parts themselves are not rounded."""
    return tensor_model_parallel_all_reduce(part).to(dtype)


def keep_on_first_rank(whole: Tensor) -> Tensor:
    """Return `whole`, which every rank has, on the first rank and zeros on the others: vLLM adds them up."""
    return whole if get_tensor_model_parallel_rank() == 0 else torch.zeros_like(whole)
