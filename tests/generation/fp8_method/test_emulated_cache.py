"""Attention on an emulated FP8 cache is vLLM's own on the values that the cache holds; the cache holds FP8."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import cast_through_cache, to_cache
from tests.vllms_attention import of_vllms_kernel

HEADS, GROUPS, DIM, BLOCK = 4, 2, 64, 128
SCALES = SimpleNamespace(_k_scale_float=2.0**-6, _v_scale_float=2.0**-5)
LENGTHS, BLOCKS = (130, 5), ((7, 2), (4,))
"""Two sequences, and which blocks of the cache they have."""


@pytest.fixture(scope="module", params=["fp8", "auto"])
def engine(request) -> SimpleNamespace:
    """What vLLM would make of our backend: attention, the plan of a forward, and an empty cache of nine blocks."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_cache import EmulatedCacheBackend

    current_platform.import_kernels()
    torch.cpu._init_amx()
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        attention = EmulatedCacheBackend.get_impl_cls()(
            HEADS, DIM, DIM**-0.5, GROUPS, None, None, request.param, None, "decoder", None
        )
    kernel = _get_attn_isa(torch.bfloat16, BLOCK, DIM, "auto")
    dtype = torch.uint8 if request.param == "fp8" else torch.bfloat16
    cache = torch.zeros(9, GROUPS, BLOCK, 2 * DIM, dtype=dtype)
    layer = SimpleNamespace(isa=kernel, **vars(SCALES))
    return SimpleNamespace(attention=attention, layer=layer, cache=cache, is_fp8=request.param == "fp8")


def sequences(groups: int, seed: int, more: int = 0) -> list[Tensor]:
    """bfloat16 [tokens, groups, DIM] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length + 1, groups, DIM, generator=generator).bfloat16()[: length + more] for length in LENGTHS]


def answered(engine: SimpleNamespace, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """A forward of the last tokens of each sequence, as many as there are queries: [tokens, HEADS, DIM]."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

    new, lengths = [len(q) for q in queries], [len(k) for k in keys]
    slots = [
        blocks[position // BLOCK] * BLOCK + position % BLOCK
        for blocks, count, length in zip(BLOCKS, new, lengths, strict=True)
        for position in range(length - count, length)
    ]
    start = torch.tensor([0, new[0], sum(new)], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=2, num_heads=HEADS, num_kv_heads=GROUPS, head_dim=DIM, seq_lens=seq_lens, dtype=torch.bfloat16,
        query_start_loc=start, causal=True, sliding_window_size=-1, isa=engine.layer.isa, enable_kv_split=False,
    )  # fmt: skip
    metadata = CPUAttentionMetadata(
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        query_start_loc=start,
        max_seq_len=max(lengths),
        seq_lens=seq_lens,
        block_table=torch.tensor([BLOCKS[0], (BLOCKS[1][0], 0)], dtype=torch.int32),
        slot_mapping=torch.tensor([*slots, -1]),  # the last one is padding
        scheduler_metadata=plan,
    )
    padding = torch.full((1, GROUPS, DIM), torch.nan, dtype=torch.bfloat16)
    key, value = (
        torch.cat([*(x[len(x) - count :] for x, count in zip(xs, new, strict=True)), padding]) for xs in (keys, values)
    )
    query = torch.cat(queries)
    engine.attention.do_kv_cache_update(engine.layer, key, value, engine.cache, metadata.slot_mapping)
    output = torch.empty_like(query)
    engine.attention.forward(engine.layer, query, key, value, engine.cache, metadata, output, output_scale=None)
    return output


def stored_form(engine: SimpleNamespace, x: Tensor, scale: float) -> Tensor:
    return cast_through_cache(x, scale, "nearest") if engine.is_fp8 else x


def test_a_prompt_and_what_follows_are_attended_to_as_the_cache_holds_them(engine):
    for more in (0, 1):
        queries, keys, values = sequences(HEADS, 1, more), sequences(GROUPS, 2, more), sequences(GROUPS, 3, more)
        expected = [
            of_vllms_kernel(
                engine.layer.isa,
                q,
                stored_form(engine, k, SCALES._k_scale_float),
                stored_form(engine, v, SCALES._v_scale_float),
            )
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        if more:  # a token each
            queries, expected = [q[-1:] for q in queries], [e[-1:] for e in expected]
        assert torch.equal(answered(engine, queries, keys, values), torch.cat(expected))


@pytest.mark.parametrize("engine", ["fp8"], indirect=True)
def test_the_cache_holds_e4m3_and_padding_leaves_it_alone(engine):
    engine.cache.zero_()
    keys, values = sequences(GROUPS, 2), sequences(GROUPS, 3)
    answered(engine, sequences(HEADS, 1), keys, values)
    expected = torch.zeros_like(engine.cache)
    for key, value, blocks in zip(keys, values, BLOCKS, strict=True):
        halves = to_cache(key, SCALES._k_scale_float, "nearest"), to_cache(value, SCALES._v_scale_float, "nearest")
        for position, token in enumerate(torch.cat([half.view(torch.uint8) for half in halves], -1)):
            expected[blocks[position // BLOCK], :, position % BLOCK] = token
    assert torch.equal(engine.cache, expected)
