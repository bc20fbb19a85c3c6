"""Core attention for Megatron's layers without Transformer Engine: the base class, and attention by torch's SDPA."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.policy.layers.context_parallel import to_heads, to_tokens
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.packed_sequences import PackedSequences
from nemo_fp8rl.policy.layers.rope import Rope


class Sequences(NamedTuple):
    """The sequences of a call of attention.

    rows:            int64 [b], their numbers in the microbatch if sequences are packed; None for all of it
    prompt_lengths:  int64 [b], with a window; else they count for nothing
    """

    rows: Tensor | None = None
    prompt_lengths: Tensor | None = None


class CoreAttention(MegatronModule):
    """Causal attention with grouped queries, in the activations' dtype; it also applies RoPE.

    Megatron is built without position embedding, so this class applies the only one. Packed sequences are padded here
    and nowhere else, because only attention mixes tokens. Under context parallelism s and tokens are those of the rank.

    With `kv_window` a query at position q sees the keys at k <= q with k < prompt length or q - k < kv_window, as the
    engine's cache keeps them. Megatron passes the prompt lengths of a microbatch, int64 [b], as `attention_mask`.

    query:       [s, b, heads, d]; packed, [tokens, heads, d]
    key, value:  [s, b, groups, d]; packed, [tokens, groups, d]
    Returns:     [s, b, heads * d]; packed, [tokens, heads * d]
    """

    kernel_name = ""  # of a library, where the recipe chooses it
    rope: Rope  # `make_attention_class` sets this and the next two
    kv_cache: TrainerKvCache | None
    kv_window: int | None

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer = layer_number - 1
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Compute attention of whole sequences at positions 0..s-1: [s, b, ...] -> [s, b, heads * d]."""
        raise NotImplementedError

    def hidden_keys(self, length: int, sequences: Sequences) -> Tensor | None:
        """Return `hidden_keys` of sequences of this length; None without a window."""
        if self.kv_window is None:
            return None
        assert sequences.prompt_lengths is not None, "Pipeline passes prompt lengths"
        return hidden_keys(length, sequences.prompt_lengths, self.kv_window)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        group = parallel_state.get_context_parallel_group(check_initialized=False)
        if group is None or group.size() == 1:
            return self._attend_sequences(query, key, value, packed_seq_params, attention_mask)
        q, k, v = to_heads(query, key, value, group)
        return to_tokens(self._attend_sequences(q, k, v, packed_seq_params, attention_mask), group)

    def _attend_sequences(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSequences | None,
        prompt_lengths: Tensor | None,
    ) -> Tensor:
        if packed is None:
            return self.attend(query, key, value, Sequences(prompt_lengths=prompt_lengths))
        outputs = []
        for group in packed.length_groups:
            q, k, v = (group.pad(t) for t in (query, key, value))
            sequences = Sequences(group.rows, None if prompt_lengths is None else prompt_lengths[group.rows])
            outputs.append(self.attend(q, k, v, sequences)[group.index])
        return torch.cat(outputs)[packed.order]


class SdpaAttention(CoreAttention):
    """Attention by torch's SDPA without cuDNN's kernels."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        query, key = self.rope.apply(query), self.rope.apply(key)
        if self.kv_cache is not None:
            key, value = self.kv_cache.read(self.layer, query, key, value, sequences.rows)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        hidden = self.hidden_keys(query.size(0), sequences)
        mask = None if hidden is None else visible_keys(hidden)[:, None]
        with _without_cudnn():
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def hidden_keys(length: int, prompt_lengths: Tensor, window: int) -> Tensor:
    """Return the keys before a query that it does not see, int64 [b, length, 2]: the first, and the one after the last.

    Both are equal where a query sees all keys before it.

    length:          tokens of a sequence
    prompt_lengths:  int64 [b]
    window:          generated tokens that a token sees, itself among them
    Source: vLLM's reference sliding window (v1/attention/ops/triton_attention_helpers.py)
    """
    position = torch.arange(length, device=prompt_lengths.device)
    first = prompt_lengths[:, None].expand(-1, length)
    return torch.stack((first, torch.maximum(first, position + 1 - window)), -1)


def visible_keys(hidden: Tensor, queries: slice = slice(None)) -> Tensor:
    """Return a mask of the keys that each query sees, bool [b, queries, length].

    hidden:   of `hidden_keys`, [b, length, 2]
    queries:  rows to compute
    """
    key = torch.arange(hidden.size(1), device=hidden.device)
    first, end = hidden[:, queries].unsqueeze(-2).unbind(-1)
    return ((key < first) | (key >= end)) & (key <= key[queries, None])


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Disable SDPA's cuDNN kernels inside the block. The flag belongs to the process, so it is restored.

    torch prefers cuDNN on Hopper and Blackwell (`check_prefer_cudnn_attention` in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). cuDNN makes a plan for every new pair of batch and length,
    which takes a fraction of a second (`MHAParams` in aten/src/ATen/native/cudnn/MHA.cpp), and most microbatches of
    training bring new ones. The other kernels take any shape at once.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def make_attention_class(
    kind: type[CoreAttention], rope: Rope, kv_cache: TrainerKvCache | None, kv_window: int | None = None
) -> type[CoreAttention]:
    """Return a subclass of `kind` with this RoPE, cache and window: Megatron builds attention from a class."""
    return type(kind.__name__, (kind,), {"rope": rope, "kv_cache": kv_cache, "kv_window": kv_window})
