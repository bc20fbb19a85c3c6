"""Each aligned module rounds where vLLM's CPU kernel does, in comparison with vLLM's own layers.

Bit-equal where it was measured. Another CPU may sum a norm's squares in another order, or fuse a multiply-add, which
moves a value across a rounding border once in thousands; another rounding point moves a few in a hundred.
"""

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.fp8 import KvScales
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.policy.layers import aligned_experts, aligned_layers
from nemo_fp8rl.policy.layers.aligned_layers import AlignedAttention, AlignedRMSNorm, aligned_residual_add, rotate
from nemo_fp8rl.policy.layers.attention import make_attention_class
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.rope import Rope, read_rope
from nemo_fp8rl.policy.on_cpu import avx_attention, avx_experts, vllm_cpu_rounding
from nemo_fp8rl.policy.on_cpu.amx_matmul import tile_product
from nemo_fp8rl.policy.on_cpu.avx_attention_loops import exponentials
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.on_cpu.vllm_cpu_rounding import experts_sum_in_order, rounds_probabilities
from tests.conftest import needs_vllms_fp8_cache
from tests.policy.test_worker import new_worker
from tests.vllms_attention import of_vllms_kernel

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


def rounds_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if at most one value in a thousand differs."""
    return share_apart(a, b) <= 1e-3


def share_apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a != b).double().mean().item()


def test_residual_and_norm_equal_vllm_over_a_chain_of_layers(config, vllm_context):
    from vllm.model_executor.layers.layernorm import RMSNorm

    vllm_norm = RMSNorm(WIDTH, eps=1e-6, dtype=torch.bfloat16)
    aligned_norm = AlignedRMSNorm(config, WIDTH, eps=1e-6)
    weight = bf16(WIDTH, seed=0)
    vllm_norm.weight.data.copy_(weight)
    aligned_norm.weight.data.copy_(weight)
    add = aligned_residual_add(True, False)
    with torch.no_grad():
        hidden = residual = bf16(ROWS, WIDTH, seed=1)
        stream = residual.float()
        expected = vllm_norm(hidden.clone())
        got = aligned_norm(stream)
        assert rounds_alike(got, expected)
        for layer in range(4):
            output = bf16(ROWS, WIDTH, seed=10 + layer)
            expected, residual = vllm_norm(output.clone(), residual.clone())
            stream = add((output, None), stream, 0.0)
            assert rounds_alike(aligned_norm(stream), expected)
            assert torch.equal(stream.bfloat16(), residual)


@pytest.mark.parametrize("factor", [None, 4.0, 3.0, 2.5])
def test_rope_equals_vllm(tmp_path, vllm_context, factor):
    from vllm.model_executor.layers.rotary_embedding import get_rope

    scaled = {"rope_type": "linear", "factor": factor} if factor else {"rope_type": "default"}
    parameters = scaled | {"rope_theta": 10_000.0}
    vllm_rope = get_rope(HEAD_DIM, max_position=1000, rope_parameters=parameters, dtype=torch.bfloat16)
    write_model(tmp_path / "model", family="llama", rope_parameters=parameters)
    rope = read_rope(tmp_path / "model", read_hf_config(tmp_path / "model"))
    table = rope.table(len(vllm_rope.cos_sin_cache), torch.bfloat16, torch.device("cpu"))
    assert torch.equal(torch.cat(table, -1)[:, 0, 0], vllm_rope.cos_sin_cache)
    q, k = bf16(ROWS, HEADS * HEAD_DIM, seed=2), bf16(ROWS, HEADS * HEAD_DIM, seed=3)
    expected_q, expected_k = vllm_rope(torch.arange(ROWS), q.clone(), k.clone())
    cos, sin = rope.table(ROWS, torch.bfloat16, q.device)
    for x, expected in ((q, expected_q), (k, expected_k)):
        got = rotate(x.view(ROWS, 1, HEADS, HEAD_DIM), cos, sin)
        assert rounds_alike(got.reshape(ROWS, -1), expected)


def skip_without(kernel: str) -> None:
    if kernel == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip(f"this CPU cannot run vLLM's kernel {kernel}")


@pytest.mark.parametrize(("kernel", "rounds"), [("vec", False), ("amx", True)])
@pytest.mark.parametrize("tokens", [7, 200])
def test_attention_equals_only_the_kernel_that_vllm_takes(config, monkeypatch, kernel, rounds, tokens):
    skip_without(kernel)
    q, k, v = (
        bf16(tokens, HEADS, HEAD_DIM, seed=11),
        bf16(tokens, 2, HEAD_DIM, seed=12),
        bf16(tokens, 2, HEAD_DIM, seed=13),
    )
    rope = Rope(torch.zeros(HEAD_DIM // 2))  # rotates nothing
    attention = make_attention_class(AlignedAttention, rope, None)(config, 1)
    expected = of_vllms_kernel(kernel, q, k, v).view(tokens, -1)
    for rounded in (rounds, not rounds):
        monkeypatch.setattr(aligned_layers, "rounds_probabilities", lambda *_, rounded=rounded: rounded)
        got = attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
        assert rounds_alike(got, expected) == (rounded is rounds)


@needs_vllms_fp8_cache
@pytest.mark.parametrize(("kernel", "is_amx"), [("vec", False), ("amx", True)])
@pytest.mark.parametrize("scales", [(2.0**-6, 2.0**-5), (2.0**-5, 2.0**-6)])
def test_attention_on_an_fp8_cache_equals_only_vllms_kernel(config, monkeypatch, kernel, is_amx, scales):
    """The scales are as from calibration: the largest value is near 448."""
    skip_without(kernel)
    q, k, v = bf16(30, HEADS, HEAD_DIM, seed=14), bf16(30, 2, HEAD_DIM, seed=15), bf16(30, 2, HEAD_DIM, seed=16)
    expected = of_vllms_kernel(kernel, q, k, v, scales).view(30, -1)
    for amx in (is_amx, not is_amx):
        monkeypatch.setattr(aligned_layers, "rounds_probabilities", lambda *_, amx=amx: amx)
        cache = TrainerKvCache(1, "toward_zero", loses_denormals=amx)
        cache.scales = KvScales(scales[:1], scales[1:], (1.0,))
        attention = make_attention_class(AlignedAttention, Rope(torch.zeros(HEAD_DIM // 2)), cache)(config, 1)
        got = attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
        assert rounds_alike(got, expected) == (amx is is_amx)


def test_a_tile_product_loses_small_sums_where_they_stand_alone():
    ones = torch.ones(1, 4)
    even, odd, lost = (
        torch.tensor([[0.5, 0.6, 0.4, 0.6]]),
        torch.tensor([[0.6, 0.5, 0.6, 0.4]]),
        torch.tensor([[0.4] * 4]),
    )
    assert tile_product(even, ones.T, 1.0).item() == 0.0  # 0.5 alone is lost, and 0.4 then, too
    assert tile_product(even, ones.T, 0.55).item() == pytest.approx(1.2)
    assert tile_product(odd, ones.T, 0.55).item() == pytest.approx(1.2)
    assert tile_product(lost, ones.T, 0.5).item() == 0.0
    a, b = bf16(2, 3, 5, 70, seed=17).float(), bf16(2, 1, 70, 4, seed=18).float()
    torch.testing.assert_close(tile_product(a, b, 0.0), a @ b, rtol=1e-5, atol=1e-5)


def test_the_rounding_is_that_of_vllms_kernel_on_this_machine():
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in (64, 80, 128):
            taken = _get_attn_isa(dtype, 128, head_dim, "auto")
            assert rounds_probabilities(dtype, head_dim) == (taken == "amx")


def test_rounded_probabilities_have_unrounded_gradients():
    scores, v = torch.randn(3, 5, 7, requires_grad=True), torch.randn(3, 7, 4, requires_grad=True)
    exact, rounded = (
        torch.autograd.grad(aligned_layers.weigh_values(scores, v, r).square().sum(), (scores, v))
        for r in (False, True)
    )
    for a, b in zip(exact, rounded, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        assert not torch.equal(a, b)


def test_the_exponential_without_avx512_is_the_c_librarys():
    """The kernel uses it, too. It differs from the nearest float32 in 1 of 1,600 cases."""
    x = np.random.default_rng(0).uniform(-20, 0, 20_000).astype(np.float32)
    expf = ctypes.CDLL(ctypes.util.find_library("m")).expf
    expf.restype, expf.argtypes = ctypes.c_float, [ctypes.c_float]
    expected = np.array([expf(value) for value in x.tolist()], np.float32)
    assert (expected != np.exp(x.astype(np.float64)).astype(np.float32)).any()
    exponentials(x, np.float32(0), False)
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "scales"),
    [
        ("vec", 128, None),
        ("vec16", 80, None),
        pytest.param("vec", 128, (2.0**-6, 2.0**-5), marks=needs_vllms_fp8_cache),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 7, 40, 100])
def test_attention_in_kernel_order_equals_vllms_vector_kernel(monkeypatch, tokens, threads, kernel, head_dim, scales):
    """Also with equal values: the order of sums decides how their truncated mean rounds."""
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS, kv_channels=head_dim, params_dtype=torch.bfloat16
    )
    monkeypatch.setattr(aligned_layers, "rounds_probabilities", lambda *_: False)
    monkeypatch.setattr(avx_attention, "THREAD_PRODUCTS", 1 if threads > 1 else 1 << 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    cache = None
    if scales:
        cache = TrainerKvCache(1, "toward_zero")
        cache.scales = KvScales(scales[:1], scales[1:], (1.0,))
    attention = make_attention_class(AlignedAttention, Rope(torch.zeros(head_dim // 2)), cache)(config, 1)
    q, k = bf16(tokens, HEADS, head_dim, seed=21), bf16(tokens, 2, head_dim, seed=22)
    for v in (bf16(tokens, 2, head_dim, seed=24), bf16(4, 2, head_dim, seed=23)[torch.arange(tokens) % 4]):
        got = attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
        assert torch.equal(got, of_vllms_kernel(kernel, q, k, v, scales).view(tokens, -1))


def test_a_mixture_equals_vllms_router_and_expert_kernel(recipe, tmp_path):
    """A layer of bfloat16 experts has equal choices, weights, outputs and sums."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    isa = "amx" if torch.cpu._init_amx() else "vec"
    write_model(tmp_path / "model", family="qwen3_moe")
    worker = new_worker(recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.flow=bf16"))
    layer = worker.model.decoder.layers[0].mlp
    x = bf16(ROWS, layer.config.hidden_size, seed=28)
    with torch.no_grad(), megatron_on_cpu():
        (got, _), experts = layer(x.unsqueeze(1)), layer.experts.local_experts
        logits = torch.nn.functional.linear(x, layer.router.weight)
        top_k = select_experts(x, logits, layer.config.moe_router_topk, use_grouped_topk=False, renormalize=True)
        w13, w2 = (
            ops.cpu_prepack_moe_weight(torch.stack([getattr(e, name).weight for e in experts]), isa)
            for name in ("linear_fc1", "linear_fc2")
        )
        expected = torch.empty_like(x)
        ops.cpu_fused_moe(expected, x, w13, w2, None, None, *top_k, "silu", isa)
    if experts_sum_in_order(torch.bfloat16):  # all but the fused multiply-adds of the sum over experts
        assert share_apart(got.squeeze(1), expected) <= 1e-4
    else:
        assert rounds_alike(got.squeeze(1), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_add_products_one_after_another(monkeypatch, fused):
    """Products and sums of floats are exact in float64 but for a last rounding, which the loop must do alike."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: fused)
    x, weight = (bf16(*shape, seed=s).float().requires_grad_() for shape, s in (((9, 300), 30), ((40, 300), 31)))
    out = avx_experts.linear_in_kernel_order(x, weight)
    total = torch.zeros(9, 40)
    for k in range(300):
        product = x.detach()[:, k, None].double() * weight.detach()[:, k].double()
        total = (total.double() + (product if fused else product.float().double())).float()
    assert torch.equal(out, total)
    gradients = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    for gradient, expected in zip(gradients, (weight.sum(0).expand(9, 300), x.sum(0).expand(40, 300)), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_the_activation_of_experts_has_the_gradient_of_silu():
    gate, up = (bf16(5, 64, seed=s).float().requires_grad_() for s in (32, 33))
    outputs = avx_experts.silu_product_in_kernel_order(gate, up), torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(*outputs)
    ours, expected = (torch.autograd.grad(out, (gate, up), torch.ones_like(out)) for out in outputs)
    torch.testing.assert_close(ours, expected)


def test_without_a_kernel_for_experts_each_is_a_dense_mlp(recipe, tmp_path, monkeypatch):
    """vLLM before 0.28 without AVX-512 uses torch's linears and weighs their outputs in float32."""
    write_model(tmp_path / "model", family="qwen3_moe")
    worker = new_worker(recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.flow=bf16"))
    layer, linear = worker.model.decoder.layers[0].mlp, torch.nn.functional.linear
    x, outputs = bf16(ROWS, layer.config.hidden_size, seed=28), {}
    with torch.no_grad(), megatron_on_cpu():
        for dense in (True, False):
            monkeypatch.setattr(aligned_experts, "experts_are_dense_mlps", lambda dense=dense: dense)
            outputs[dense] = layer(x.unsqueeze(1))[0].squeeze(1)
        best = linear(x, layer.router.weight).topk(layer.config.moe_router_topk)
        weights, expected = best.values.softmax(-1).float(), torch.zeros(x.shape)
        for number, expert in enumerate(layer.experts.local_experts):
            gate, up = linear(x, expert.linear_fc1.weight).chunk(2, -1)
            out = linear(torch.nn.functional.silu(gate) * up, expert.linear_fc2.weight)
            expected += out * (weights * (best.indices == number)).sum(-1, keepdim=True)
    assert [rounds_alike(outputs[dense], expected.bfloat16()) for dense in (True, False)] == [True, False]


def test_truncation_has_the_gradient_of_rounding(config, monkeypatch):
    attention = make_attention_class(AlignedAttention, Rope(FREQUENCIES), None)(config, 1)
    q, k, v = (bf16(21, 2, HEADS, HEAD_DIM, seed=s).requires_grad_() for s in (25, 26, 27))
    gradients = {}
    for cuts in (True, False):
        monkeypatch.setattr(vllm_cpu_rounding, "truncates", lambda dtype, cuts=cuts: cuts)
        monkeypatch.setattr(aligned_layers, "sums_in_order", lambda dtype, cuts=cuts: cuts)
        out = attention(q, k, v)
        gradients[cuts] = out, torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not rounds_alike(gradients[True][0], gradients[False][0])
    for cut, plain in zip(gradients[True][1], gradients[False][1], strict=True):
        torch.testing.assert_close(cut, plain, rtol=0.05, atol=0.05)


def test_query_blocks_do_not_change_the_attention(config, monkeypatch):
    monkeypatch.setattr(aligned_layers, "sums_in_order", lambda dtype: False)
    whole, blocked = (
        make_attention_class(AlignedAttention, Rope(FREQUENCIES), None)(config, 1),
        make_attention_class(AlignedAttention, Rope(FREQUENCIES), None)(config, 1),
    )
    blocked.QUERY_BLOCK = 8
    q, k, v = (bf16(21, 2, HEADS, HEAD_DIM, seed=s) for s in (4, 5, 6))
    # float32 inside: blocks only regroup the matmul, the rounded output may differ by its last bit
    torch.testing.assert_close(whole(q, k, v), blocked(q, k, v), rtol=2**-7, atol=2**-8)


def test_other_rounding_points_give_other_values(config, vllm_context):
    """The negative control: the norm of the ROUNDED sum, and RoPE with a rounding after each product."""
    norm = AlignedRMSNorm(config, WIDTH)
    x, residual = bf16(ROWS, WIDTH, seed=7), bf16(ROWS, WIDTH, seed=8)
    stream = aligned_residual_add(True, False)((x, None), residual.float(), 0.0)
    assert not rounds_alike(norm(stream), norm(stream.bfloat16()))
    q, rope = bf16(ROWS, 1, HEADS, HEAD_DIM, seed=9), Rope(FREQUENCIES)
    assert not rounds_alike(rotate(q, *rope.table(ROWS, q.dtype, q.device)), rope.apply(q))
