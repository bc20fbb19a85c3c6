"""Sums over the tensor-parallel ranks of an engine on CPU, rounded once, as one rank would."""

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce


def sum_over_ranks(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The ranks' parts, float32, added up and then rounded to `dtype`: each rank's part is not rounded."""
    return tensor_model_parallel_all_reduce(part).to(dtype)


def keep_on_first_rank(whole: Tensor) -> Tensor:
    """What the ranks, all of which hold `whole`, hand to vLLM, which adds it up over them: the first has it all."""
    return whole if get_tensor_model_parallel_rank() == 0 else torch.zeros_like(whole)
