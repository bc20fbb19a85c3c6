"""FlashAttention 3 with one split of the keys, which a recipe may choose in the place of `attention`.

With one split, heads of 128 and causal attention it walks all keys in tiles of one size (hopper/tile_size.h), so that a
row should not depend on its batch; the fingerprint checks that. It is vLLM's build of the library where vLLM is
installed, else the library's own package (`flash_attn_interface`), which a trainer alone can use: it has no pages.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.common.errors import UserError

NAME = "attention: FlashAttention 3 with one split"
HOPPER = (9, 0)
CHOICE = "policy.generation.vllm_cfg.attention_backend=FLASH_ATTN with nemo_fp8rl.align=vllm"
OTHERWISE = "or leave attention_backend out, and both sides take their shared kernel"


def check_machine() -> None:
    """Raise UserError where this GPU cannot run FlashAttention 3, or no package has it; imports none."""
    if (capability := torch.cuda.get_device_capability()) != HOPPER:
        raise UserError(
            f"{CHOICE}: FlashAttention 3 needs a Hopper GPU (capability 9.0), and this one has "
            f"{'.'.join(map(str, capability))}; take a Hopper GPU, {OTHERWISE}"
        )
    if not any(map(importlib.util.find_spec, ("vllm", "flash_attn_interface"))):
        raise UserError(f"{CHOICE}: {_no_package()}")


def _no_package() -> str:
    return (
        "FlashAttention 3 is neither in vllm.vllm_flash_attn nor in flash_attn_interface; install one of them "
        f"for the trainer, {OTHERWISE}"
    )


@functools.cache
def load() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return (q, k, v, **vLLM's keywords) -> (out, lse). Raises UserError where no package has it."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        return functools.partial(flash_attn_varlen_func, fa_version=3, return_softmax_lse=True)
    except ImportError:
        pass
    try:
        import flash_attn_interface
    except ImportError:
        raise UserError(f"{CHOICE}: {_no_package()}") from None
    return functools.partial(flash_attn_interface.flash_attn_varlen_func, return_attn_probs=True)


def _call(*tensors: Tensor, **further: Any) -> tuple[Tensor, Tensor]:
    out, lse = load()(*tensors, causal=True, num_splits=1, **further)[:2]
    return out, lse


def attend_sequences(q: Tensor, k: Tensor, v: Tensor, sequences: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out [sequences * s, heads, d], log-sum-exp [heads, sequences * s]) of sequences of one length.

    q:     [sequences * s, heads, d]
    k, v:  [sequences * s, groups, d]
    """
    s = len(q) // sequences
    starts = torch.arange(0, len(q) + 1, s, dtype=torch.int32, device=q.device)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": s, "max_seqlen_k": s}
    return _call(q.contiguous(), k.contiguous(), v.contiguous(), softmax_scale=scale, **lengths)


def attend_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    most_queries: int,
    most_keys: int,
) -> None:
    """Write attention into `out`; the arguments are those of `attention`, and the largest numbers of a sequence."""
    _call(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=query_starts,
        max_seqlen_q=most_queries,
        max_seqlen_k=most_keys,
        seqused_k=lengths,
        block_table=block_table,
        softmax_scale=scale,
        out=out,
    )


def attention_on_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
) -> tuple[Tensor, None]:
    """Return `attention` of these arguments as an engine computes it, for a fingerprint."""
    out, most_queries = torch.empty_like(q), int(query_starts.diff().max())
    pages = k_cache, v_cache, block_table
    attend_pages(q, *pages, query_starts, lengths, scale, out, most_queries, int(lengths.max()))
    return out, None


def attention_without_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return `attention` of these arguments by the call that a trainer makes, for a fingerprint."""
    rows = list(zip(block_table.long(), lengths.tolist(), strict=True))
    k, v = (torch.cat([cache[pages].flatten(0, 1)[:n] for pages, n in rows]) for cache in (k_cache, v_cache))
    return _call(
        q,
        k,
        v,
        cu_seqlens_q=query_starts,
        cu_seqlens_k=F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=int(query_starts.diff().max()),
        max_seqlen_k=int(lengths.max()),
        softmax_scale=scale,
    )
