"""Each aligned module rounds where vLLM's CPU kernel does: held against vLLM's own layers.

Bit-equal where it was measured. Another CPU may sum a norm's squares in another order, or fuse a multiply-add, which
moves a value across a rounding border once in thousands; another rounding point moves a few in a hundred.
"""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_fp8rl.policy.align import AlignedRMSNorm, aligned_attention, aligned_residual_add, rotate
from nemo_fp8rl.policy.rope import Rope

ROWS, WIDTH, HEADS, HEAD_DIM = 37, 256, 4, 128
FREQUENCIES = 1.0 / 10_000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)


@pytest.fixture(scope="module")
def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS, kv_channels=HEAD_DIM, params_dtype=torch.bfloat16
    )


@pytest.fixture(scope="module")
def vllm_context():
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    eager = CompilationConfig(custom_ops=["all"])  # an eager engine's choice: vLLM's own kernels, not torch fallbacks
    with set_current_vllm_config(VllmConfig(compilation_config=eager)):
        yield


def bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounds_alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """At most one value in a thousand differs."""
    return (ours != theirs).double().mean().item() <= 1e-3


def test_residual_and_norm_equal_vllm_over_a_chain_of_layers(config, vllm_context):
    from vllm.model_executor.layers.layernorm import RMSNorm

    theirs = RMSNorm(WIDTH, eps=1e-6, dtype=torch.bfloat16)
    ours = AlignedRMSNorm(config, WIDTH, eps=1e-6)
    weight = bf16(WIDTH, seed=0)
    theirs.weight.data.copy_(weight)
    ours.weight.data.copy_(weight)
    add = aligned_residual_add(True, False)
    with torch.no_grad():
        hidden = residual = bf16(ROWS, WIDTH, seed=1)
        stream = residual.float()
        expected = theirs(hidden.clone())
        got = ours(stream)
        assert rounds_alike(got, expected)
        for layer in range(4):
            output = bf16(ROWS, WIDTH, seed=10 + layer)
            expected, residual = theirs(output.clone(), residual.clone())
            stream = add((output, None), stream, 0.0)
            assert rounds_alike(ours(stream), expected)
            assert torch.equal(stream.bfloat16(), residual)


def test_rope_equals_vllm(config, vllm_context):
    from vllm.model_executor.layers.rotary_embedding import get_rope

    theta = 10_000.0
    rope = get_rope(
        HEAD_DIM, max_position=64, rope_parameters={"rope_type": "default", "rope_theta": theta}, dtype=torch.bfloat16
    )
    q, k = bf16(ROWS, HEADS * HEAD_DIM, seed=2), bf16(ROWS, HEADS * HEAD_DIM, seed=3)
    expected_q, expected_k = rope(torch.arange(ROWS), q.clone(), k.clone())
    cos, sin = Rope(FREQUENCIES).table(ROWS, torch.bfloat16)
    for x, expected in ((q, expected_q), (k, expected_k)):
        got = rotate(x.view(ROWS, 1, HEADS, HEAD_DIM), cos, sin)
        assert rounds_alike(got.reshape(ROWS, -1), expected)


def test_query_blocks_do_not_change_the_attention(config):
    whole, blocked = (
        aligned_attention(Rope(FREQUENCIES), None)(config, 1),
        aligned_attention(Rope(FREQUENCIES), None)(config, 1),
    )
    blocked.QUERY_BLOCK = 8
    q, k, v = (bf16(21, 2, HEADS, HEAD_DIM, seed=s) for s in (4, 5, 6))
    # float32 inside: blocks only regroup the matmul, the rounded output may differ by its last bit
    torch.testing.assert_close(whole(q, k, v), blocked(q, k, v), rtol=2**-7, atol=2**-8)


def test_other_rounding_points_are_told_apart(config, vllm_context):
    """The negative control: the norm of the ROUNDED sum, and RoPE with a rounding after each product."""
    norm = AlignedRMSNorm(config, WIDTH)
    x, residual = bf16(ROWS, WIDTH, seed=7), bf16(ROWS, WIDTH, seed=8)
    stream = aligned_residual_add(True, False)((x, None), residual.float(), 0.0)
    assert not rounds_alike(norm(stream), norm(stream.bfloat16()))
    cos, sin = Rope(FREQUENCIES).table(ROWS, torch.bfloat16)
    q = bf16(ROWS, 1, HEADS, HEAD_DIM, seed=9)
    x1, x2 = q.chunk(2, -1)
    c, s = cos.bfloat16(), sin.bfloat16()
    assert not rounds_alike(rotate(q, cos, sin), torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1))
