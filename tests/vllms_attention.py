"""vLLM's attention on a CPU, by its kernels."""

import torch


def of_vllms_kernel(
    kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: tuple[float, float] | None = None
) -> torch.Tensor:
    """Its causal attention of one sequence; all [tokens, heads, head dim] but for what grouped heads share. scales: of
    keys and values in an FP8 cache.
    """
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.cpu._init_amx()  # Linux gives a process the tiles when it asks for them
    tokens, block = len(q), 128
    blocks = -(-tokens // block)
    fp8 = {"k_scale": scales[0], "v_scale": scales[1], "kv_cache_dtype": "fp8"} if scales else {}
    cache = torch.zeros(blocks, k.size(1), block * 2, q.size(2), dtype=torch.uint8 if scales else q.dtype)
    keys, values = cache.chunk(2, 2)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(tokens), kernel, **fp8)
    start, length = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=q.size(1), num_kv_heads=k.size(1), head_dim=q.size(2), seq_lens=length, dtype=q.dtype,
        query_start_loc=start, causal=True, sliding_window_size=-1, isa=kernel, enable_kv_split=True,
        **({"kv_cache_dtype": "fp8"} if scales else {}),
    )  # fmt: skip
    out = torch.empty_like(q)
    ops.cpu_attention_with_kv_cache(
        query=q, key_cache=keys, value_cache=values, output=out, query_start_loc=start, seq_lens=length,
        scale=q.size(2) ** -0.5, causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=torch.arange(blocks, dtype=torch.int32)[None], softcap=0.0, scheduler_metadata=schedule, s_aux=None,
        **fp8,
    )  # fmt: skip
    return out
