"""Context parallelism: a rank has part of the tokens of every sequence; in attention, all tokens of part of the heads.

Only attention mixes tokens, so ranks communicate only there, twice: queries, keys and values go from parts of tokens to
parts of heads, and the output of attention goes back (DeepSpeed-Ulysses, arXiv 2309.14509). Attention itself sees whole
sequences, so it rounds as on one rank, and all ranks have equal work. Parts are consecutive.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange this rank's part of the tokens for its part of the heads.

    query:       [t / n, ..., heads, d]
    key, value:  [t / n, ..., groups, d]
    Returns:     [t, ..., heads / n, d] and twice [t, ..., groups / n, d]; with fewer groups than ranks, a rank gets the
                 group that its queries read
    """
    size, groups = group.size(), key.size(-2)
    if groups < size:
        key, value = (x.repeat_interleave(size // groups, -2) for x in (key, value))
    parts = [x.unflatten(-2, (size, -1)) for x in (query, key, value)]
    sent = torch.cat(parts, -2).movedim(-3, 0)
    received = all_to_all(group, sent).flatten(0, 1)
    query, key, value = received.split([part.size(-2) for part in parts], -2)
    return query, key, value


def to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange heads for tokens: [t, ..., heads / n * d] of all tokens -> [t / n, ..., heads * d] of this rank's."""
    received = all_to_all(group, out.unflatten(0, (group.size(), -1)))
    return received.movedim(0, -2).flatten(-2)


def gather_tokens(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks: [B, T / n] -> [B, T].

    All ranks must compute the same from the result, because each takes the gradient of its part from its own whole.
    """
    if group.size() == 1:
        return part
    by_token = part.t().contiguous()
    return gather_from_sequence_parallel_region(by_token, tensor_parallel_output_grad=False, group=group).t()
