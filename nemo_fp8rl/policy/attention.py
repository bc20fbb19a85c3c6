"""Core attention for Megatron's layers without Transformer Engine: what both of ours share, and the one on SDPA."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.batch import flat_index
from nemo_fp8rl.policy.kv_cache import TrainerKvCache


class CoreAttention(MegatronModule):
    """Causal, with grouped queries. query [s, b, heads, d], key, value [s, b, groups, d] -> [s, b, heads * d].

    All in the activations' dtype. Packed sequences have [tokens, heads, d] instead and give [tokens, heads * d]; they
    are padded here and nowhere else, since all of a layer but its attention treats every token alike: those of like
    length together, so that padding at most doubles them.
    """

    kv_cache: TrainerKvCache | None  # set by the function that makes a class for the spec

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer = layer_number - 1
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None) -> Tensor:
        """[s, b, ...] -> [s, b, heads * d]. rows: int64 [b], which of the packed sequences these are."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            return self.attend(query, key, value)
        ends = packed_seq_params.cu_seqlens_q.long()
        lengths = ends.diff()
        powers = lengths.log2().ceil()
        outputs, places = [], []
        for power in powers[lengths > 0].unique():
            rows = (powers == power).nonzero().flatten()
            row, position = flat_index(lengths[rows])
            place = ends[rows][row] + position
            shape = int(lengths[rows].max()), len(rows)
            q, k, v = (
                t.new_zeros(*shape, *t.shape[1:]).index_put((position, row), t[place]) for t in (query, key, value)
            )
            outputs.append(self.attend(q, k, v, rows)[position, row])
            places.append(place)
        return torch.cat(outputs)[torch.cat(places).argsort()]


class SdpaAttention(CoreAttention):
    """On torch's SDPA."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None) -> Tensor:
        if self.kv_cache is not None:
            key, value = self.kv_cache.read(self.layer, key, value, rows)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)


def sdpa_attention(kv_cache: TrainerKvCache | None) -> type[SdpaAttention]:
    """The class for a model with this cache: Megatron builds its attention from a class, not an instance."""
    return type("SdpaAttention", (SdpaAttention,), {"kv_cache": kv_cache})
