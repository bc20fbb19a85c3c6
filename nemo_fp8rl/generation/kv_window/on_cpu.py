"""Attention on a windowed cache on a CPU, for which vLLM has no kernel there.

A query that sees all keys before it is left to vLLM: those of a prompt, and those of the first tokens of an answer. For
each other query, the keys and values that it sees are copied next to each other, prompt first and window behind, and
vLLM's kernel attends to them as to a shorter sequence. So sums are in that order, and the trainer sums in it as well.

The backend replaces vLLM's. In an engine without a window it is vLLM's, or `emulated_cache`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from nemo_fp8rl.fp8 import can_vllm_read_fp8_cache, from_cache
from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_cache import (
    KEY,
    VALUE,
    EmulatedCacheAttention,
    EmulatedCacheMetadataBuilder,
)
from nemo_fp8rl.generation.kv_window.spec import WindowImplMixin, WindowSpecMixin

COPIED_TOKENS = 2**14
"""Tokens that are copied at a time, at least those of one query."""


def register_windows() -> None:
    """Replace vLLM's attention backend on a CPU, in this process, by one that knows windows."""
    backend = WindowBackend if can_vllm_read_fp8_cache() else EmulatedWindowBackend
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{backend.__qualname__}")


class Copy(NamedTuple):
    """The sources and places of copied tokens; int64 [tokens] each.

    blocks, offsets:  a block of the engine's cache and a token in it
    slots:            places in the copy
    num_blocks:       blocks of the copy
    """

    blocks: Tensor
    offsets: Tensor
    slots: Tensor
    num_blocks: int


class Part(NamedTuple):
    """Queries of a forward for one call of the kernel.

    queries:   int64 [queries], their places in the forward
    metadata:  of these queries alone
    copy:      the cache that they read; None: the engine's
    """

    queries: Tensor
    metadata: CPUAttentionMetadata
    copy: Copy | None


@dataclass
class WindowMetadata(CPUAttentionMetadata):
    """Metadata of a forward of which some queries do not see all keys before them."""

    parts: tuple[Part, ...] = ()


class WindowMetadataBuilder(CPUAttentionMetadataBuilder):
    """Divides a forward into `Part`s, once for all layers.

    window:  generated tokens that a token sees; all of them without a window
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        self.window: int = model.max_model_len if model.rswa_window is None else model.rswa_window

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        whole, common = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        prompts = common.rswa_prefix_lens
        if prompts is None:
            return whole
        visible = prompts[: common.num_reqs].long() + self.window  # the first query that does not see all keys
        if bool((common.seq_lens[: common.num_reqs] <= visible).all()):
            return whole
        columns = {field.name: getattr(whole, field.name) for field in fields(whole)}
        return WindowMetadata(**columns, parts=tuple(self._parts(common, visible)))

    def _parts(self, common: CommonAttentionMetadata, visible: Tensor) -> Iterator[Part]:
        starts, lengths = common.query_start_loc.long(), common.seq_lens[: common.num_reqs].long()
        counts = starts.diff()
        seeing_all = (visible - (lengths - counts)).clamp(min=0).minimum(counts)  # queries of each sequence
        if (rows := seeing_all.nonzero()[:, 0]).numel():
            queries = _ranges(starts[rows], seeing_all[rows])
            reads = lengths[rows].minimum(visible[rows])
            yield Part(queries, self._plan(common, seeing_all[rows], reads, common.block_table_tensor[rows]), None)
        row = torch.arange(common.num_reqs).repeat_interleave(counts - seeing_all)  # of each of the other queries
        queries = _ranges(starts[:-1] + seeing_all, counts - seeing_all)
        positions = queries - starts[row] + (lengths - counts)[row]
        reads = visible[row]  # as many as the first of them would see
        for some in torch.arange(len(row)).split(max(1, COPIED_TOKENS // int(reads.max()))):
            copy, table = self._copy(common.block_table_tensor[row[some]].long(), positions[some], reads[some])
            yield Part(queries[some], self._plan(common, torch.ones_like(some), reads[some], table), copy)

    def _copy(self, block_table: Tensor, positions: Tensor, reads: Tensor) -> tuple[Copy, Tensor]:
        """Return the copy for these queries, and its block table.

        block_table:  int64 [queries, blocks], of the sequence of each query
        positions:    int64 [queries], in their sequences
        reads:        int64 [queries], tokens that each sees
        """
        query = torch.arange(len(reads)).repeat_interleave(reads)  # of each copied token, as the next two
        place = _ranges(torch.zeros_like(reads), reads)
        is_prompt = place < reads[query] - self.window
        position = torch.where(is_prompt, place, positions[query] - (reads[query] - 1 - place))
        size = self.block_size
        num_blocks = -(-reads // size)
        firsts = num_blocks.cumsum(0) - num_blocks
        copy = Copy(
            blocks=block_table[query, position // size],
            offsets=position % size,
            slots=firsts[query] * size + place,
            num_blocks=int(num_blocks.sum()),
        )
        column = torch.arange(int(num_blocks.max()))
        return copy, torch.where(column < num_blocks[:, None], firsts[:, None] + column, 0).int()

    def _plan(
        self, common: CommonAttentionMetadata, counts: Tensor, lengths: Tensor, block_table: Tensor
    ) -> CPUAttentionMetadata:
        """Return vLLM's metadata of some queries.

        counts:       int64 [sequences], queries of each
        lengths:      int64 [sequences], tokens that the last query of each sees
        block_table:  int32 [sequences, blocks]
        """
        start = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        part = common.replace(
            num_reqs=len(counts),
            num_actual_tokens=int(start[-1]),
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=lengths.int(),
            block_table_tensor=block_table,
        )
        return super().build(0, part)


class WindowAttention(WindowImplMixin, CPUAttentionBackendImpl):
    """vLLM's attention, part by part."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(attn_metadata, WindowMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        for part in attn_metadata.parts:
            some = query[part.queries]
            out = torch.empty_like(some)
            if part.copy is None:
                super().forward(layer, some, None, None, kv_cache, part.metadata, out, *args, **kwargs)
            else:
                copied = self._copied(layer, kv_cache, part.copy, query.dtype)
                CPUAttentionBackendImpl.forward(
                    self, layer, some, None, None, copied, part.metadata, out, *args, **kwargs
                )
            output[part.queries] = out
        return output

    def _copied(self, layer: Any, kv_cache: Tensor, copy: Copy, dtype: torch.dtype) -> Tensor:
        """Return a cache of these tokens in the layout of vLLM's kernel."""
        key, value = self._tokens(layer, kv_cache, copy, dtype)
        copied = torch.zeros(copy.num_blocks, *kv_cache.shape[1:], dtype=self._copy_dtype(kv_cache, dtype))
        halves = copied.view(copied.size(0), copied.size(1), 2 * copied.size(2), -1).chunk(2, dim=2)
        # scales of 1: codes of an FP8 cache are written as they are
        ops.cpu_attn_reshape_and_cache(
            key, value, *halves, copy.slots, layer.isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=self.kv_cache_dtype
        )
        return copied

    def _copy_dtype(self, kv_cache: Tensor, dtype: torch.dtype) -> torch.dtype:
        return kv_cache.dtype

    def _tokens(self, layer: Any, kv_cache: Tensor, copy: Copy, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values, both [tokens, groups, d] in `dtype`; of an FP8 cache its codes, without scales."""
        blocks, groups, block_size, _ = kv_cache.shape
        content = kv_cache.view(torch.float8_e4m3fn) if self.is_fp8_kv_cache else kv_cache
        halves = content.view(blocks, groups, 2, -1)
        places = _places(layer.isa, block_size, kv_cache.size(-1) // 2, dtype, self.kv_cache_dtype)
        block, group = copy.blocks[:, None, None], torch.arange(groups)[:, None]
        key, value = (
            halves[block, group, half, place[copy.offsets][:, None]].to(dtype)
            for half, place in zip((KEY, VALUE), places, strict=True)
        )
        return key, value


class EmulatedWindowAttention(WindowAttention, EmulatedCacheAttention):
    """`WindowAttention` for a machine on which FP8 caches are emulated; the copy of such a cache is dequantized."""

    def _copy_dtype(self, kv_cache: Tensor, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.emulates else kv_cache.dtype

    def _tokens(self, layer: Any, kv_cache: Tensor, copy: Copy, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not self.emulates:
            return super()._tokens(layer, kv_cache, copy, dtype)
        codes = kv_cache.view(torch.float8_e4m3fn)[copy.blocks, :, copy.offsets].unflatten(-1, (2, -1))
        scales = layer._k_scale_float, layer._v_scale_float
        key, value = (
            from_cache(codes[:, :, half], scale, dtype) for half, scale in zip((KEY, VALUE), scales, strict=True)
        )
        return key, value


class EmulatedWindowMetadataBuilder(WindowMetadataBuilder, EmulatedCacheMetadataBuilder):
    """Plans for a cache in the model's dtype, as those of `emulated_cache` are."""


class WindowBackend(WindowSpecMixin, CPUAttentionBackend):
    """vLLM's backend with windows. It keeps vLLM's name, by which vLLM looks backends up."""

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return WindowAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return WindowMetadataBuilder


class EmulatedWindowBackend(WindowBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return EmulatedWindowAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return EmulatedWindowMetadataBuilder


@cache
def _places(isa: str, block_size: int, d: int, dtype: torch.dtype, cache_dtype: str) -> tuple[Tensor, Tensor]:
    """Return the places of keys and values of a block's tokens, int64 [block_size, d] each, by writing one block.

    Kernels have layouts of their own. The digits of the values' numbers are written, which are exact in every format
    because they are below 16.
    """
    numbers = torch.arange(block_size * d).view(block_size, 1, d)
    stored = torch.zeros(2, block_size * d, dtype=torch.int64)
    content = torch.zeros(1, 1, 2 * block_size, d, dtype=dtype if cache_dtype == "auto" else torch.uint8)
    for digit in range(0, (block_size * d).bit_length(), 4):
        x = ((numbers >> digit) & 15).to(dtype)
        ops.cpu_attn_reshape_and_cache(
            x, x, *content.chunk(2, dim=2), torch.arange(block_size), isa, kv_cache_dtype=cache_dtype
        )
        values = content if cache_dtype == "auto" else content.view(torch.float8_e4m3fn)
        stored += values.view(2, -1).to(torch.int64) << digit
    key, value = stored.argsort().view(2, block_size, d)
    return key, value


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Return the numbers start, start + 1, ..., `count` of them, of each pair, one pair behind the other."""
    ends = counts.cumsum(0)
    return (starts - (ends - counts)).repeat_interleave(counts) + torch.arange(int(ends[-1]) if len(ends) else 0)
