"""Attention of an aligned engine by the shared kernel, on vLLM's pages and with vLLM's metadata.

vLLM's backend for Triton stays in charge of everything else: it plans batches, and writes keys and values into pages of
the model's dtype. The kernels are `nemo_fp8rl.ops.attention`, and `ops.kv_pages` for an FP8 KV cache; the trainer calls
both as well. Queries stay in the model's dtype.

A recipe may choose FlashAttention 3 (`ops.flash_attention`) to read the pages. With the plans of this backend it gets
neither a schedule nor a number of splits nor a common prefix, all of which would depend on the batch.

With a window of the KV cache (vLLM's reference sliding window) vLLM frees the pages between prompt and window, and the
kernel reads none of them. `kv_window.shared_ops` has the backend for it.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.fp8_method.shared_ops.engine_choice import kv_window, uses_flash_attention_3
from nemo_fp8rl.ops.attention import attend
from nemo_fp8rl.ops.flash_attention import attend_pages
from nemo_fp8rl.ops.kv_pages import write_pages

E4M3 = ("fp8", "fp8_e4m3")
"""vLLM's names of the FP8 KV cache with one scale per layer."""


class SharedAttention:
    """A mixin before an attention implementation of vLLM: its forward, for causal attention without extras."""

    head_size: int
    scale: float
    has_fp8_cache: bool
    uses_flash_attention_3: bool
    window: int | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        extras = {
            f"a KV cache of {kv_cache_dtype}": is_quantized_kv_cache(kv_cache_dtype) and kv_cache_dtype not in E4M3,
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a soft cap of scores": bool(logits_soft_cap),
            "attention sinks": kwargs.get("sinks") is not None,
            "attention other than a decoder's": attn_type != AttentionType.DECODER,
        }
        if found := [name for name, is_there in extras.items() if is_there]:
            raise ValueError(
                f"nemo_fp8rl.align=vllm: the shared attention does not do {' or '.join(found)}; set "
                "nemo_fp8rl.align=none"
            )
        shape = num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window
        super().__init__(*shape, kv_cache_dtype, logits_soft_cap, attn_type, *args, **kwargs)  # type: ignore[call-arg]
        self.has_fp8_cache, self.uses_flash_attention_3 = kv_cache_dtype in E4M3, uses_flash_attention_3()
        self.supports_quant_query_input, self.window = False, kv_window()

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of keys and values, both [pages, page_size, groups, d]."""
        cache = kv_cache.view(torch.float8_e4m3fn) if self.has_fp8_cache else kv_cache
        return vllm_compat.keys_and_values(cache, self.head_size)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values [tokens, groups, d] into the pages.

        slot_mapping:  int64 [tokens without padding], vLLM's; negative where a token has no place
        """
        if self.has_fp8_cache:
            write_pages(key, value, *self.pages(kv_cache), slot_mapping, layer._k_scale, layer._v_scale)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Write attention into `output` [tokens, heads, d]; keys and values are in the pages already.

        attn_metadata:  vLLM's, with num_actual_tokens, block_table, query_start_loc, seq_lens, and the largest numbers
                        of a sequence, max_query_len and max_seq_len, and with a window the prompts' lengths,
                        rswa_prefix_lens; None while vLLM measures memory
        """
        if attn_metadata is None:
            return output.fill_(0)
        tokens, heads = attn_metadata.num_actual_tokens, query.size(1)
        scales = (layer._k_scale, layer._v_scale) if self.has_fp8_cache else (None, None)
        kept = () if self.window is None else (attn_metadata.rswa_prefix_lens, self.window)
        sequences = attn_metadata.block_table, attn_metadata.query_start_loc, attn_metadata.seq_lens
        if self.uses_flash_attention_3:
            most = attn_metadata.max_query_len, attn_metadata.max_seq_len
            attend_pages(query[:tokens], *self.pages(kv_cache), *sequences, self.scale, output[:tokens], *most)
            return output
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
        attend(query[:tokens], *self.pages(kv_cache), *sequences, self.scale, output[:tokens], lse, *scales, *kept)
        return output


class SharedTritonAttention(SharedAttention, TritonAttentionImpl):
    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


class SharedAttentionBackend(TritonAttentionBackend):
    """vLLM's backend for Triton with our kernel; an engine asks for it by attention_backend=CUSTOM."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return SharedTritonAttention
