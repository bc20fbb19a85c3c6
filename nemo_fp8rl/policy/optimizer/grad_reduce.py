"""The sum of gradients over data-parallel ranks: by Megatron, with a float32 sum of lower-precision values, or in FP8.

Megatron cuts a bucket of gradients into one shard for each rank, which updates the weights of its shard. It calls one
function for each bucket, and `GradReduceDdp` puts its own in that place. In FP8, where g_r is the gradient of rank r:

    sum = (...(q(g_0) + q(g_1)) + q(g_2)...)     float32, in the order of ranks; rounded once to the gradient's dtype
    q   = `quantize_activations`, then dequantized, in blocks of 128 values of one parameter

Each rank sends to every other rank its shard of the FP8 values, and adds what it gets. So nothing is added in FP8,
where a ring would round at every rank, and nothing overflows. A block never spans two parameters: a parameter that
tensor-parallel ranks share would lie beside different values on each of them, and its copies would drift apart.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.config.policy_schema import DdpConfig
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, E4M3, BlockScaled
from nemo_fp8rl.fp8.quantize import quantize_activations

BLOCK = ALONG_LAST[1]
ROW_BYTES = BLOCK + 4
"""Bytes of a block in a message: its values, then its float32 scale."""
PIECE_VALUES = 1 << 26
"""Values that a rank sends at a time, which bounds the memory beside the gradients."""
MEGATRON_REDUCE_SCATTER = param_and_grad_buffer.dist_reduce_scatter_func
"""torch's reduce-scatter. Megatron replaces it for the whole process once a model has
reduce_scatter_with_fp32_accumulation, so Megatron is never told of that key."""


@dataclass(frozen=True)
class ParameterBlocks:
    """Blocks of 128 values of a bucket, counted through its parameters; the last block of each may be shorter.

    spans:  (number of its first block, its first value, the end of its values) of each parameter, in their order
    """

    spans: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, parameters: Iterator[tuple[int, int]]) -> "ParameterBlocks":
        """parameters:  (first value, end) of each, in the bucket."""
        spans, block = list[tuple[int, int, int]](), 0
        for start, end in sorted(parameters):
            spans.append((block, start, end))
            block += count_blocks(end - start)
        return cls(tuple(spans))

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Return the first block with a value in [start, end), and the end of such blocks; equal if there is none."""
        found = [
            (block + (max(start, first) - first) // BLOCK, block + count_blocks(min(end, last) - first))
            for block, first, last in self.spans
            if first < end and last > start
        ]
        return (found[0][0], found[-1][1]) if found else (0, 0)

    def read(self, values: Tensor, first: int, end: int) -> Tensor:
        """Return the blocks `first` to `end` of a bucket's values [M], [end - first, 128], filled up with zeros."""
        blocks = values.new_zeros((end - first) * BLOCK)
        for at, start, stop in self._parts(first, end):
            blocks[at : at + stop - start] = values[start:stop]
        return blocks.view(-1, BLOCK)

    def write(self, blocks: Tensor, first: int, shard: Tensor, offset: int) -> None:
        """Write the values of `blocks`, [n, 128] from block `first` on, that lie in a shard.

        shard:   [S], the values `offset` to offset + S of the bucket
        """
        flat = blocks.view(-1)
        for at, start, stop in self._parts(first, first + len(blocks)):
            a, b = max(start, offset), min(stop, offset + len(shard))
            if a < b:
                shard[a - offset : b - offset] = flat[at + a - start : at + b - start]

    def _parts(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place among the blocks' values, first value in the bucket, end) of each parameter in these blocks."""
        begin = max(0, bisect_right(self.spans, first, key=itemgetter(0)) - 1)
        for block, start, stop in islice(self.spans, begin, None):
            if block >= end:
                return
            a, b = max(first, block), min(end, block + count_blocks(stop - start))
            if a < b:
                yield (a - first) * BLOCK, start + (a - block) * BLOCK, min(stop, start + (b - block) * BLOCK)


def count_blocks(values: int) -> int:
    return -(-values // BLOCK)


class GradReduceDdp(DistributedDataParallel):
    """Megatron's DDP, which sums gradients as the recipe says.

    choice:      a recipe's `distributed_data_parallel_config`
    fp8:         nemo_fp8rl.grad_reduce is fp8
    sent_bytes:  bytes of gradients that this rank sent to other data-parallel ranks in the last `finish_grad_sync`: of
                 a reduce-scatter the shards of the others, whichever way they go
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        choice: DdpConfig,
        fp8: bool,
    ) -> None:
        super().__init__(config, ddp_config, module)
        self.sent_bytes = self.bucket_count = 0
        self.reduce_scatter = self._add_in_megatron
        if choice.reduce_scatter_with_fp32_accumulation:
            self.reduce_scatter = self._add_in_float32
        if fp8:
            self.reduce_scatter = self._add_fp8
        buffers = [*self.buffers, *self.expert_parallel_buffers]
        self.blocks = {
            id(bucket.grad_data): ParameterBlocks.of(
                (start - bucket.offset, end - bucket.offset)
                for start, end in (buffer.param_index_map[parameter][:2] for parameter in bucket.params_list)
            )
            for buffer in buffers
            for bucket in buffer.buckets
        }

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients of all buckets into this rank's shards."""
        assert not force_all_reduce, "Megatron's all-reduce would pass by the choice of the recipe"
        self.sent_bytes, self.bucket_count = 0, 0
        with mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", self._sum_bucket):
            super().finish_grad_sync()
        if self.bucket_count != len(self.blocks):
            raise RuntimeError("this Megatron sums gradients by another function, which the package does not know")

    def _sum_bucket(
        self, shard: Tensor, bucket: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Sum a bucket; Megatron calls it in place of torch's reduce-scatter.

        shard:   this rank's part of `bucket`, into which the sum goes
        bucket:  [ranks * len(shard)]
        """
        assert op == dist.ReduceOp.SUM and not async_op
        self.bucket_count += 1
        if group.size() > 1:
            self.reduce_scatter(shard, bucket, group)

    def _add_in_megatron(self, shard: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> None:
        self.sent_bytes += bucket.nbytes - shard.nbytes
        MEGATRON_REDUCE_SCATTER(shard, bucket, op=dist.ReduceOp.SUM, group=group)

    def _add_in_float32(self, shard: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> None:
        parts, length = bucket.view(group.size(), -1), max(1, PIECE_VALUES // group.size())
        for start in range(0, len(shard), length):
            sent = parts[:, start : start + length].contiguous()
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=group)
            self.sent_bytes += sent.nbytes - sent[0].nbytes
            total = received[0].float()
            for part in received[1:]:
                total += part
            shard[start : start + length] = total

    def _add_fp8(self, shard: Tensor, bucket: Tensor, group: dist.ProcessGroup) -> None:
        blocks, size, rank = self.blocks[id(bucket)], group.size(), group.rank()
        offset = rank * len(shard)
        ranges = [blocks.within(r * len(shard), (r + 1) * len(shard)) for r in range(size)]
        length = max(1, PIECE_VALUES // BLOCK // size)
        sums = list[tuple[Tensor, int]]()
        for done in range(0, max(end - first for first, end in ranges), length):
            pieces = [(min(first + done, end), min(first + done + length, end)) for first, end in ranges]
            counts = [end - first for first, end in pieces]
            message = encode(torch.cat([blocks.read(bucket, *piece) for piece in pieces]))
            received = message.new_empty(size * counts[rank], ROW_BYTES)
            dist.all_to_all_single(received, message, [counts[rank]] * size, counts, group=group)
            self.sent_bytes += message.nbytes - counts[rank] * ROW_BYTES
            total = torch.zeros(counts[rank], BLOCK, device=bucket.device)
            for part in received.view(size, counts[rank], ROW_BYTES):
                total += decode(part)
            sums.append((total.to(bucket.dtype), pieces[rank][0]))
        for total, first in sums:  # at the end, because a block at the edge of two shards goes to both
            blocks.write(total, first, shard, offset)


def encode(values: Tensor) -> Tensor:
    """Return blocks of values [n, 128] in FP8 as rows of bytes, uint8 [n, 132]."""
    quantized = quantize_activations(values)
    return torch.cat([quantized.data.view(torch.uint8), quantized.scale_inv.view(torch.uint8)], 1)


def decode(rows: Tensor) -> Tensor:
    """Return the values, float32 [n, 128], of `encode`'s rows; those of a block that was not finite are NaN."""
    data, scale_inv = rows[:, :BLOCK].contiguous().view(E4M3), rows[:, BLOCK:].contiguous().view(torch.float32)
    return BlockScaled(data, scale_inv, ALONG_LAST).dequantize()


def largest_of_ranks(number: int) -> float:
    """Return the largest of all ranks' numbers, on all ranks alike."""
    largest = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
