"""Causal attention on pages of keys and values, whose rows do not depend on the batch.

For each row (a query of one head) keys are walked from position 0 upwards in blocks of BLOCK_KEYS:

    m'  = max(m, max of q . k)                     of float32 products, not yet scaled
    p   = exp(fma(q . k, scale, -(m' * scale)))
    a   = exp((m * scale) - (m' * scale))
    l   = fma(l, a, sum of p)
    acc = acc * a + (p in the dtype of v) . v
    out = acc / l                                  one rounding to q's dtype
    lse = fma(m, scale, log(l))

Keys and values of an FP8 KV cache are first code * scale in float32, rounded to q's dtype (`kv_pages`).

A key that a row does not see has p = 0. A block without a key that the row sees changes nothing: m' = m, a = 1, and it
adds exact zeros to l and acc. So it does not count how far the walk goes, which other queries are in a tile, or where
the pages are: prefill, chunks of it, decode and other batches give the same bits. The tile is fixed, because a product
of matrices may add in another order in another tile.

In a window a query at position q sees the keys at k <= q with k < prompt length or q - k < window. The walk leaves out
the blocks between that no row of a tile sees, and no key between is read: a cache may have given its page away.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.ops.elementary import exp, log

BLOCK_ROWS, BLOCK_KEYS = 64, 64
"""A tile: BLOCK_ROWS // (heads per group) queries of all heads of a group, by BLOCK_KEYS keys."""


@triton.jit(do_not_specialize=["window", "tokens", "sequences", "page_size"])
def attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, block_table, query_starts, lengths, prompt_lengths, out, lse, scale,
    window, tokens, sequences, heads_per_group, page_size, d,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_table,
    stride_k_page, stride_k_slot, stride_k_group, stride_v_page, stride_v_slot, stride_v_group,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the rows of QUERIES queries of one sequence, for the heads of one group.

    Program b of the first axis belongs to the last sequence i with query_starts[i] // QUERIES + i <= b: numbers that
    ascend by at least the tiles that each sequence needs. A program beyond its sequence's queries writes nothing.
    HEADS is heads_per_group or the next power of two. The last dimension of q, caches and out is contiguous.
    k_scale and v_scale are None where the caches have q's dtype; prompt_lengths and window where all keys are seen.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    low = tile * 0  # not a constant, because the loop changes it
    high = low + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    start = tl.load(query_starts + low)
    queries, length = tl.load(query_starts + low + 1) - start, tl.load(lengths + low)
    first = (tile - (start // QUERIES + low)) * QUERIES
    if first < queries:
        row, column = tl.arange(0, QUERIES * HEADS), tl.arange(0, BLOCK_D)
        query, head = first + row // HEADS, group * heads_per_group + row % HEADS
        position = length - queries + query
        inside_row = (query < queries) & (row % HEADS < heads_per_group)
        token, inside = (start + query).to(tl.int64), inside_row[:, None] & (column[None, :] < d)
        at = token[:, None] * stride_q_token + head[:, None] * stride_q_head + column[None, :]
        rows = tl.load(q + at, mask=inside, other=0.0)
        if k_scale is not None:
            k_factor, v_factor = tl.load(k_scale), tl.load(v_scale)

        m = tl.full([QUERIES * HEADS], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES * HEADS], tl.float32)
        acc = tl.zeros([QUERIES * HEADS, BLOCK_D], tl.float32)
        end = length - queries + tl.minimum(first + QUERIES, queries)  # behind the last key that a row sees
        walked = end
        if prompt_lengths is not None:
            prompt = tl.load(prompt_lengths + low)
            window_start = tl.maximum(length - queries + first - window + 1, 0)  # of the tile's first query
            gap_start = tl.cdiv(prompt, BLOCK_KEYS) * BLOCK_KEYS
            gap = tl.maximum(window_start // BLOCK_KEYS * BLOCK_KEYS - gap_start, 0)
            walked = end - gap
        for walked_start in range(0, walked, BLOCK_KEYS):
            key_start = walked_start
            if prompt_lengths is not None:
                key_start = tl.where(walked_start < gap_start, walked_start, walked_start + gap)
            key = key_start + tl.arange(0, BLOCK_KEYS)
            is_kept = key < end
            if prompt_lengths is not None:
                is_kept = is_kept & ((key < prompt) | (key >= window_start))
            page = tl.load(block_table + low.to(tl.int64) * stride_table + key // page_size, mask=is_kept, other=0)
            page, slot, loaded = page.to(tl.int64), key % page_size, is_kept[:, None] & (column[None, :] < d)
            k_at = page * stride_k_page + slot * stride_k_slot + group * stride_k_group
            v_at = page * stride_v_page + slot * stride_v_slot + group * stride_v_group
            k = tl.load(k_cache + k_at[:, None] + column[None, :], mask=loaded, other=0.0)
            v = tl.load(v_cache + v_at[:, None] + column[None, :], mask=loaded, other=0.0)
            if k_scale is not None:
                k = (k.to(tl.float32) * k_factor).to(rows.dtype)
                v = (v.to(tl.float32) * v_factor).to(rows.dtype)
            score = tl.dot(rows, tl.trans(k), input_precision="ieee")
            is_seen = key[None, :] <= position[:, None]
            if prompt_lengths is not None:
                is_seen = is_seen & ((key < prompt)[None, :] | (position[:, None] - key[None, :] < window))
            score = tl.where(is_seen, score, float("-inf"))
            m_new = tl.maximum(m, tl.max(score, 1))
            p = exp(tl.fma(score, scale, -(m_new * scale)[:, None]))
            shrink = exp(m * scale - m_new * scale)
            total = tl.fma(total, shrink, tl.sum(p, 1))
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            m = m_new

        at = token[:, None] * stride_out_token + head[:, None] * stride_out_head + column[None, :]
        tl.store(out + at, tl.div_rn(acc, total[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(lse + head.to(tl.int64) * tokens + token, tl.fma(m, scale, log(total)), mask=inside_row)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prompt_lengths: Tensor | None = None,
    window: int | None = None,
) -> None:
    """Write what `attention` returns; rows behind the last sequence's are left as they are."""
    tokens, heads, d = q.shape
    page_size, groups, sequences = k_cache.size(1), k_cache.size(2), len(lengths)
    heads_per_group = heads // groups
    padded_heads = triton.next_power_of_2(heads_per_group)
    if padded_heads > BLOCK_ROWS or any(x.stride(-1) != 1 for x in (q, k_cache, v_cache, out)):
        raise ValueError(
            f"attention takes up to {BLOCK_ROWS} heads per group, and values of one head side by side in memory; "
            f"there are {heads_per_group} heads per group, and strides {q.stride()}, {k_cache.stride()}, "
            f"{v_cache.stride()}, {out.stride()}"
        )
    if {k_cache.dtype, v_cache.dtype} != {q.dtype if k_scale is None else torch.float8_e4m3fn}:
        raise ValueError(
            f"attention reads keys and values of the queries' dtype, or E4M3 with scales; queries are {q.dtype}, keys "
            f"{k_cache.dtype}, values {v_cache.dtype}, with{'out' if k_scale is None else ''} scales"
        )
    if (prompt_lengths is None) != (window is None):
        raise ValueError(
            f"attention takes prompt lengths and a window together; window is {window}, with"
            f"{'out' if prompt_lengths is None else ''} prompt lengths"
        )
    if not tokens or not sequences:
        return
    queries = BLOCK_ROWS // padded_heads
    attention_kernel[(tokens // queries + sequences, groups)](
        q, k_cache, v_cache, k_scale, v_scale, block_table, query_starts, lengths, prompt_lengths, out, lse, scale,
        window, tokens, sequences, heads_per_group, page_size, d,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), block_table.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        QUERIES=queries, HEADS=padded_heads, BLOCK_KEYS=BLOCK_KEYS, BLOCK_D=max(16, triton.next_power_of_2(d)),
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip


@torch.library.custom_op("nemo_fp8rl::attention", mutates_args=())
def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prompt_lengths: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [tokens, heads, d] in q's dtype, log of the sum of exp(score), float32 [heads, tokens]).

    Query i of a sequence stands at position length - queries + i and sees the keys up to its own position. It has no
    gradient. Rows of tokens behind the last sequence's are zero.

    q:                 [tokens, heads, d]; the sequences' queries one after the other
    k_cache, v_cache:  [pages, page_size, groups, d], of any strides but the last; heads // groups heads share a group;
                       in q's dtype or, with scales, float8_e4m3fn
    block_table:       int32 [sequences, at least ceil(length / page_size)], pages of each sequence
    query_starts:      int32 [sequences + 1], first token of each sequence, and their end
    lengths:           int32 [sequences], keys of each sequence
    scale:             multiplies scores; above 0
    k_scale, v_scale:  float32, one value each; multiplies codes of E4M3
    prompt_lengths:    int32 [sequences], each at least 1; with a window
    window:            the last keys that a query sees besides the prompt's, its own among them; at least 1
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.zeros(q.size(1), q.size(0), dtype=torch.float32, device=q.device)
    further = k_scale, v_scale, prompt_lengths, window
    attend(q, k_cache, v_cache, block_table, query_starts, lengths, scale, out, lse, *further)
    return out, lse


@attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)
