"""Attention on a windowed cache is vLLM's own on the tokens that a query sees, side by side; in each kind of cache."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import can_vllm_read_fp8_cache, cast_through_cache
from tests.vllms_attention import of_vllms_kernel

HEADS, GROUPS, DIM, BLOCK, WINDOW = 4, 2, 64, 32, 40
K_SCALE, V_SCALE = 2.0**-6, 2.0**-5
PROMPTS, LENGTHS, NEW = (50, 9, 70, 20), (170, 31, 64, 110), (1, 1, 64, 100)
"""Four sequences: an answer beyond its window, one within it, a prompt alone, and a prompt with most of an answer."""
vllm_reads_fp8 = pytest.mark.skipif(not can_vllm_read_fp8_cache(), reason="vLLM has no kernel for an FP8 cache here")
KINDS = [("vllm", "auto"), pytest.param("vllm", "fp8", marks=vllm_reads_fp8), ("emulated", "auto"), ("emulated", "fp8")]


@pytest.mark.parametrize(("owner", "cache_dtype"), KINDS)
def test_it_is_vllms_attention_on_what_a_query_sees(owner, cache_dtype):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from nemo_fp8rl.generation.kv_window import on_cpu

    current_platform.import_kernels()
    torch.cpu._init_amx()
    dtype, is_emulated = torch.bfloat16, owner == "emulated"
    backend = on_cpu.EmulatedWindowBackend if is_emulated else on_cpu.WindowBackend
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=dtype, rswa_window=WINDOW)
    with set_current_vllm_config(config):
        attention = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, GROUPS, None, None, cache_dtype)
    kernel_cache = "auto" if is_emulated else cache_dtype
    isa = _get_attn_isa(dtype, BLOCK, DIM, kernel_cache)
    layer = SimpleNamespace(isa=isa, _k_scale_float=K_SCALE, _v_scale_float=V_SCALE)
    queries, keys, values = (sequences(groups, seed) for groups, seed in ((HEADS, 1), (GROUPS, 2), (GROUPS, 3)))

    # blocks in any order; those between prompt and window hold what must not be read
    needed = [-(-length // BLOCK) for length in LENGTHS]
    order = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(4)) + 1).split(needed)
    table = torch.zeros(len(LENGTHS), max(needed), dtype=torch.int32)
    for row, numbers in zip(table, order, strict=True):
        row[: len(numbers)] = numbers
    cache = torch.zeros(
        sum(needed) + 1, GROUPS, BLOCK, 2 * DIM, dtype=torch.uint8 if cache_dtype == "fp8" else torch.bfloat16
    )
    for row, key, value, prompt, length, new in zip(table, keys, values, PROMPTS, LENGTHS, NEW, strict=True):
        position = torch.arange(length)
        is_hidden = (position >= prompt) & (position <= length - new - WINDOW)
        slots = row[position // BLOCK].long() * BLOCK + position % BLOCK
        wrong = torch.where(is_hidden[:, None, None], torch.nan if cache_dtype == "auto" else 3.0, 0.0).to(dtype)
        attention.do_kv_cache_update(layer, key + wrong, value + wrong, cache, slots)

    builder = object.__new__(backend.get_builder_cls())  # vLLM's constructor reads the layers of a model
    builder.__dict__ |= dict(
        window=WINDOW, block_size=BLOCK, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM, dtype=dtype, isa=isa,
        window_size=-1, kv_cache_dtype=kernel_cache, is_cross_attention=False, is_encoder_only_attention=False,
    )  # fmt: skip
    start = torch.tensor([0, *NEW]).cumsum(0).int()
    common = CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        num_reqs=len(NEW),
        num_actual_tokens=sum(NEW),
        max_query_len=max(NEW),
        max_seq_len=max(LENGTHS),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(NEW), dtype=torch.int64),
        rswa_prefix_lens=torch.tensor(PROMPTS, dtype=torch.int32),
    )
    asked = torch.cat([query[-new:] for query, new in zip(queries, NEW, strict=True)])
    output = torch.full_like(asked, torch.nan)
    attention.forward(layer, asked, None, None, cache, builder.build(0, common), output)

    scales = (K_SCALE, V_SCALE) if kernel_cache == "fp8" else None
    expected = []
    for query, key, value, prompt, length, new in zip(queries, keys, values, PROMPTS, LENGTHS, NEW, strict=True):
        if cache_dtype == "fp8" and is_emulated:
            key, value = cast_through_cache(key, K_SCALE, "nearest"), cast_through_cache(value, V_SCALE, "nearest")
        for q in range(length - new, length):
            k = torch.arange(q + 1)
            seen = (k < prompt) | (q - k < WINDOW)
            out = of_vllms_kernel(isa, query[: q + 1][seen], key[: q + 1][seen], value[: q + 1][seen], scales)
            expected.append(out[-1])
    assert torch.equal(output, torch.stack(expected))


def sequences(groups: int, seed: int) -> list[Tensor]:
    """bfloat16 [tokens, groups, DIM] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, groups, DIM, generator=generator).bfloat16() for length in LENGTHS]
