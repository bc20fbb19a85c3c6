"""What attention is told of prompts, by vLLM's builder for Triton: a batch's lengths, in memory that graphs keep."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nemo_fp8rl.generation import vllm_compat

pytestmark = pytest.mark.skipif(not vllm_compat.has_kv_windows(), reason="the installed vLLM has no windows")
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


def make_builder(window: int | None, is_aligned: bool = True) -> Any:
    from nemo_fp8rl.generation.kv_window.on_gpu import WindowTritonBackend  # vLLM 0.25 cannot import them
    from nemo_fp8rl.generation.kv_window.shared_ops import WindowSharedBackend

    backend: Any = WindowSharedBackend if is_aligned else WindowTritonBackend
    model = SimpleNamespace(
        rswa_window=window,
        get_num_attention_heads=lambda parallel: 4,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: 32,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE),
    )
    return backend.get_builder_cls()(SPEC, [], config, torch.device("cpu"))


def batch(lengths: list[int], prompts: list[int] | None) -> CommonAttentionMetadata:
    """One query of each sequence."""
    starts, n = torch.arange(len(lengths) + 1, dtype=torch.int32), len(lengths)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=n,
        num_actual_tokens=n,
        max_query_len=1,
        max_seq_len=max(lengths),
        block_table_tensor=torch.zeros(n, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(n, dtype=torch.int64),
        rswa_prefix_lens=None if prompts is None else torch.tensor(prompts),
    )


@pytest.mark.parametrize("is_aligned", [True, False], ids=["aligned", "vllm"])
@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([5, 9, 2], [5, 9, 2]),
        (None, [1, 1, 1]),  # while a graph is captured
        ([5, 9], [5, 9, 1]),  # a graph of more sequences than there are
        ([5, 9, 0, 7], [5, 9, 1]),
    ],
    ids=["all", "none", "fewer", "stale"],
)
def test_every_sequence_of_a_batch_has_a_prompt(is_aligned, prompts, expected):
    builder = make_builder(6, is_aligned)
    before = builder.build(0, batch([20, 30, 40, 50], [4, 4, 4, 4])).rswa_prefix_lens
    metadata = builder.build(0, batch([20, 30, 40], prompts))
    assert metadata.rswa_prefix_lens.tolist() == expected
    assert metadata.rswa_prefix_lens.dtype is torch.int32
    assert metadata.rswa_prefix_lens.data_ptr() == before.data_ptr()
    assert metadata.rswa_window == 6


def test_without_a_window_attention_is_told_of_none():
    assert make_builder(None).build(0, batch([20, 30], [5, 5])).rswa_prefix_lens is None
