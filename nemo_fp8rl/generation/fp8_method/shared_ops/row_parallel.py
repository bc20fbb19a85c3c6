"""vLLM's row-parallel layer, whose sum over ranks has one order in an aligned engine.

A sum of two ranks is rounded once in either order, so it stays vLLM's. So does that of the embedding, which adds zeros
to one number.
"""

from typing import Any

from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import RowParallelLinear

from nemo_fp8rl.generation.fp8_method.shared_ops.engine_choice import is_aligned_engine
from nemo_fp8rl.ops.rank_sum import UNORDERED_RANKS, sum_in_rank_order


class SharedRowParallelLinear(RowParallelLinear):
    """vLLM's layer, which leaves the sum of more than two ranks of an aligned engine to `sum_in_rank_order`."""

    reduce_results: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums_in_rank_order = is_aligned_engine() and self.reduce_results and self.tp_size > UNORDERED_RANKS
        if self.sums_in_rank_order:
            self.reduce_results = False  # vLLM's forward then returns this rank's product

    def forward(self, input_: Tensor) -> Any:
        """Return what vLLM's forward returns: the sum over ranks [..., N], with a bias if `return_bias`."""
        result = super().forward(input_)
        if not self.sums_in_rank_order:
            return result
        product, *bias = result if self.return_bias else (result,)
        parts = tensor_model_parallel_all_gather(product.contiguous(), dim=0)
        total = sum_in_rank_order(parts.view(self.tp_size, *product.shape))
        return (total, *bias) if self.return_bias else total
