"""Log-softmax of float32 rows.

    out = (x - max) - log(sum of exp(x - max))      float32

The sum has BLOCK lanes: lane i adds the columns i, i + BLOCK, i + 2 * BLOCK, ... in this order, and `tree_sum` adds the
lanes. It has no gradient: its callers compute the softmax for theirs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.ops.elementary import exp, log, tree_sum

BLOCK = 1024
ROWS_OF_SMALL_VOCABULARIES = 8
"""Rows of a program where a row has one value in each lane. It changes no bit."""


@triton.jit
def log_softmax_kernel(x, out, rows, columns, stride_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write ROWS rows of out [rows, columns], which is contiguous."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    x += row * stride_row
    out += row * columns
    lane = tl.arange(0, BLOCK)[None, :]
    largest = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = (row < rows) & (start + lane < columns)
        largest = tl.maximum(largest, tl.load(x + start + lane, mask=inside, other=-float("inf")))
    maximum = tl.max(largest, 1)[:, None]
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        inside = (row < rows) & (start + lane < columns)
        lanes += exp(tl.load(x + start + lane, mask=inside, other=-float("inf")) - maximum)
    log_sum = log(tree_sum(lanes, ROWS, BLOCK))[:, None]
    for start in range(0, columns, BLOCK):
        inside = (row < rows) & (start + lane < columns)
        value = tl.load(x + start + lane, mask=inside, other=0.0)
        tl.store(out + start + lane, (value - maximum) - log_sum, mask=inside)


@torch.library.custom_op("nemo_fp8rl::log_softmax", mutates_args=())
def log_softmax(x: Tensor) -> Tensor:
    """Return the log-softmax of x, float32 [rows, columns], over its columns."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if rows := len(x):
        at_once = ROWS_OF_SMALL_VOCABULARIES if x.size(1) <= BLOCK else 1
        log_softmax_kernel[(triton.cdiv(rows, at_once),)](
            x, out, rows, x.size(1), x.stride(0), ROWS=at_once, BLOCK=BLOCK
        )
    return out


@log_softmax.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)
