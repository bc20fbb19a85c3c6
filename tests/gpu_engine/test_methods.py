"""The methods for GPUs by themselves."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from nemo_fp8rl.common.vllm_version import vllm_version
from nemo_fp8rl.fp8 import LinearRecipe, fprop, kernels, quantize_activations, quantize_blockwise
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST
from nemo_fp8rl.generation.fp8_method import gpu_linear
from nemo_fp8rl.generation.fp8_method.gpu_experts import NativeFp8MoEMethod
from nemo_fp8rl.generation.fp8_method.gpu_linear import KERNELS, NativeFp8LinearMethod
from nemo_fp8rl.policy.layers.logprobs import TokenFilter, filter_logits

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 256, 128, 2
QUANTIZE = torch.ops.nemo_fp8rl.quantize_activations


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize(
    ("tokens", "rows", "strides"), [(5, 0, (2, 1)), (5, 1, (1, 5)), (5, 4, (1, 8)), (8, 4, (1, 8))]
)
def test_activations_are_the_contracts_in_the_layout_of_the_kernel(tokens, rows, strides, scale_format):
    x = randn(tokens, 256)
    data, scale_inv = QUANTIZE(x, scale_format == "pow2", rows)
    expected = quantize_blockwise(x, block=ALONG_LAST, scale_format=scale_format, kernel="reference")
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scale_inv, expected.scale_inv)
    assert scale_inv.stride() == strides
    torch.library.opcheck(QUANTIZE, (x, scale_format == "pow2", rows))


class Operations(TorchDispatchMode):
    """Names of what was called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_a_gpus_quantizer_writes_scales_where_the_kernel_takes_them(monkeypatch, tokens, rows, scale_format):
    monkeypatch.setattr(kernels, "resolve", lambda name, device: "triton")
    x = randn(tokens, 300)
    with Operations() as called:
        data, scale_inv = gpu_linear._quantize_activations._init_fn(x, scale_format == "pow2", rows)
    expected = quantize_blockwise(x, block=ALONG_LAST, scale_format=scale_format, kernel="reference")
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scale_inv, expected.scale_inv)
    assert scale_inv.stride() == gpu_linear._scales_like(x, rows).stride()
    assert "aten::copy_" not in called.names
    torch.library.opcheck(QUANTIZE, (x, scale_format == "pow2", rows))


@pytest.fixture
def in_vllm():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def test_a_value_that_is_not_finite_stays_visible():
    x = randn(3, 256)
    x[1, 200] = torch.inf
    assert quantize_activations(x).scale_inv.isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.usefixtures("in_vllm")
def test_the_fastest_kernel_that_can_is_taken(monkeypatch):
    asked = []

    def can(kernel_class, config, capability):
        asked.append(kernel_class.__name__)
        return kernel_class.__name__.startswith(able), f"{kernel_class.__name__} cannot."

    monkeypatch.setattr(gpu_linear, "is_supported_and_can_implement_kernel", can)
    able = "Triton"
    kernel, rows = gpu_linear._kernel((384, 256), torch.bfloat16)
    assert (type(kernel).__name__, rows) == (KERNELS[-1].name, 0)
    assert asked == [kind.name for kind in KERNELS]
    able = "Cutlass"
    assert gpu_linear._kernel((384, 256), torch.bfloat16)[1] == 1
    with pytest.raises(ValueError, match=r"no FP8 kernel for .* \[384, 200\].*for whole blocks alone.*Triton.*cannot"):
        gpu_linear._kernel((384, 200), torch.bfloat16)
    able = "DeepGemm"  # whose scales are float32 only on Hopper
    with pytest.raises(ValueError, match=r"no FP8 kernel for .* \[384, 256\].*used on Hopper alone.*Triton.*cannot"):
        gpu_linear._kernel((384, 256), torch.bfloat16)


@pytest.mark.usefixtures("in_vllm")
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_a_linear_layer_is_the_emulated_one(scale_format):
    x, weight, bias = randn(2, 3, 256), quantize_blockwise(randn(384, 256, seed=1)), randn(384, seed=2)
    method = NativeFp8LinearMethod(LinearRecipe(scale_format=scale_format))
    method.kernel, method.rows = gpu_linear._kernel((384, 256), torch.bfloat16)
    y = method.apply(SimpleNamespace(weight=weight.data, weight_scale_inv=weight.scale_inv), x, bias)
    expected = fprop(x, weight.dequantize(torch.float32), method.recipe) + bias
    assert y.shape == (2, 3, 384)
    assert (y == expected).float().mean() > 0.99
    torch.testing.assert_close(y, expected)


@pytest.mark.usefixtures("in_vllm")
def test_torch_compile_sees_a_linear_layer_whole():
    method = NativeFp8LinearMethod(LinearRecipe())
    method.kernel, method.rows = gpu_linear._kernel((384, 256), torch.bfloat16)
    x, weight = randn(3, 256), quantize_blockwise(randn(384, 256, seed=1))
    layer = SimpleNamespace(weight=weight.data, weight_scale_inv=weight.scale_inv)
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(lambda x: method.apply(layer, x), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), method.apply(layer, x))


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_a_compiled_quantizer_takes_any_number_of_tokens(rows):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False, error_on_recompile=True):
        compiled = torch.compile(
            lambda x: torch.ops.nemo_fp8rl.quantize_activations(x, True, rows), backend="aot_eager", fullgraph=True
        )
        for tokens in (8, 5, 16):
            x = randn(tokens, 256)
            torch._dynamo.mark_dynamic(x, 0)
            expected = quantize_activations(x)
            data, scale_inv = compiled(x)
            assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(scale_inv, expected.scale_inv)


@pytest.fixture
def experts():
    """(layer, the same cut into two ranks' experts)"""
    w13 = quantize_blockwise(randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=3))
    w2 = quantize_blockwise(randn(EXPERTS, HIDDEN, INTERMEDIATE, seed=4))

    def layer(own: list[int], expert_map: Tensor | None):
        return SimpleNamespace(
            w13_weight=w13.data[own],
            w13_weight_scale_inv=w13.scale_inv[own],
            w2_weight=w2.data[own],
            w2_weight_scale_inv=w2.scale_inv[own],
            global_num_experts=EXPERTS,
            expert_map=expert_map,
        )

    ranks = [layer([0, 2], torch.tensor([0, -1, 1, -1])), layer([1, 3], torch.tensor([-1, 0, -1, 1]))]
    return layer([0, 1, 2, 3], None), ranks


def test_two_ranks_of_experts_say_together_what_one_does(experts):
    whole, ranks = experts
    method = object.__new__(NativeFp8MoEMethod)
    method.scale_format = "pow2"
    x = randn(7, HIDDEN, seed=5)
    chosen = torch.rand((7, EXPERTS), generator=torch.Generator().manual_seed(7)).topk(TOP_K).indices.int()
    chosen[0] = torch.tensor([0, 2])  # of which the second rank has none
    weights = torch.rand((7, TOP_K), generator=torch.Generator().manual_seed(6))
    together = method.multiply(whole, x, weights, chosen)
    parts = [method.multiply(rank, x, weights, chosen) for rank in ranks]
    assert not parts[1][0].any()
    difference = sum(part.float() for part in parts) - together.float()
    assert difference.abs().max() < 0.01 * together.abs().max()


def kept(logits: Tensor, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """Which tokens vLLM's sampler leaves, and the trainer."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    rows = len(logits)
    k = None if top_k is None else torch.full((rows,), top_k, dtype=torch.int32)
    p = None if top_p == 1 else torch.full((rows,), top_p)
    engine = apply_top_k_top_p(logits.clone(), k, p)
    trainer = filter_logits(logits, logits.argmax(-1), TokenFilter(top_k, top_p))
    return engine > -torch.inf, trainer > -torch.inf


class Counter(int):
    """Of a loop of a kernel: in the interpreter a number, which has no method for its type."""

    def to(self, dtype: object) -> "Counter":
        return self


@pytest.mark.skipif(vllm_version() < (0, 32), reason="another kernel, perhaps")
@pytest.mark.parametrize(("top_k", "top_p"), [(20, 1.0), (None, 0.6), (20, 0.8)])
def test_a_gpus_sampler_leaves_the_trainers_tokens_but_for_ties(monkeypatch, top_k, top_p):
    """vLLM's Triton kernel, of its module for GPUs."""
    from vllm.v1.sample.ops import topk_topp_triton

    monkeypatch.setattr(topk_topp_triton, "num_compute_units", lambda device: 4)
    monkeypatch.setattr(interpreter, "range", lambda *limits: map(Counter, range(*limits)), raising=False)
    ties = (12 * randn(4, 2000).float()).round() / 4
    apart = ties + 1e-3 * torch.rand(ties.shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(*kept(apart, top_k, top_p))
    engine, trainer = kept(ties, top_k, top_p)
    if top_k is None:  # as many, though of those that tie not always the same
        assert torch.equal(engine.sum(-1), trainer.sum(-1))
        assert torch.equal(*(ties.masked_fill(~left, torch.inf).amin(-1) for left in (engine, trainer)))
    elif top_p == 1:  # of those that tie with the k-th some go
        assert (engine.sum(-1) == top_k).all()
        assert (trainer.sum(-1) > top_k).any()
        assert not (engine & ~trainer).any()
