"""The Hadamard transform of the operands that a weight's gradient sums over tokens.

It spreads an outlier over 16 tokens, so that the others of its block keep more bits. Both operands are transformed by
the same orthogonal matrix, which therefore leaves their product.

Source: Transformer Engine, custom_recipes/reference_nvfp4.py, get_wgrad_sign_vector and _apply_rht; arXiv 2509.25149.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine's fixed signs, which make the transform a random one."""


@functools.cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """Return the orthogonal matrix, float32 [16, 16]: signs times Sylvester's matrix, divided by 4."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (torch.tensor(SIGNS, dtype=torch.float32)[:, None] * matrix / SIZE**0.5).to(device)


def transform_tokens(x: Tensor) -> Tensor:
    """Return x [T, C] transposed and transformed along its tokens, bfloat16 [C, T rounded up to a multiple of 16].

    Tokens are padded with zeros. Input and output are bfloat16; a sum is rounded once.
    """
    columns = F.pad(x.to(torch.bfloat16).t(), (0, -x.size(0) % SIZE)).float()
    return (columns.reshape(-1, SIZE) @ hadamard_matrix(x.device)).to(torch.bfloat16).view(columns.shape)
