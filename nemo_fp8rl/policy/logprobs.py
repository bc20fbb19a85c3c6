"""Log-probabilities of given tokens without the logits of a whole batch: [tokens, vocabulary] exists a chunk at a time.

With a vocabulary of 151,936 the float32 logits of one sequence of 2,048 tokens take 1.2 GB, and softmax and backward
take several times that. Here a chunk's logits are computed, read and dropped, and computed again in the backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SOFTMAX_ROWS = 16
"""Rows whose softmax is taken at a time, in float32."""


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int) -> Tensor:
    """float32 [N]: log softmax(hidden @ weight^T / temperature) at the targets, with gradients.

    hidden: [N, H], in weight's dtype. weight: [V, H]. targets: int64 [N]. Logits have weight's dtype, everything after
    them is float32. chunk_size: tokens whose logits exist at a time.
    """
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, chunk_size)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), chunk_size):
            logits = hidden[start : start + chunk_size] @ weight.t()
            for row in range(0, len(logits), SOFTMAX_ROWS):
                rows = slice(start + row, start + min(row + SOFTMAX_ROWS, len(logits)))
                logprobs = (logits[row : row + SOFTMAX_ROWS].float() / temperature).log_softmax(-1)
                out[rows] = logprobs.gather(-1, targets[rows, None]).squeeze(-1)
            del logits  # before the next ones are made
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            logits = hidden[part] @ weight.t()
            for row in range(0, len(logits), SOFTMAX_ROWS):
                rows = slice(start + row, start + min(row + SOFTMAX_ROWS, len(logits)))
                slope = grad[rows, None] / ctx.temperature
                grad_logits = (logits[row : row + SOFTMAX_ROWS].float() / ctx.temperature).softmax(-1).mul_(-slope)
                grad_logits.scatter_add_(-1, targets[rows, None], slope)
                logits[row : row + SOFTMAX_ROWS] = grad_logits  # in the logits' place and dtype
            grad_hidden[part] = logits @ weight
            _add_product(grad_weight, logits, hidden[part])
            del logits
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] += left^T @ right, in float32, a slice of rows at a time so that no second [V, H] is needed."""
    step = max(1, (1 << 20) // total.size(1))
    for start in range(0, len(total), step):
        total[start : start + step] += left[:, start : start + step].t() @ right
