"""Log-probs and gradients in chunks equal those of the whole softmax."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_fp8rl.policy.layers import logprobs
from nemo_fp8rl.policy.layers.logprobs import Measurement, TokenFilter, filter_logits, token_logprobs
from nemo_fp8rl.policy.sharpness import sharpness

N, H, V = 75, 24, 101


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden, weight, targets, and a gradient with zeros (masked tokens)."""
    random = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, H, generator=random).to(dtype).requires_grad_() for n in (N, V))
    targets = torch.randint(0, V, (N,), generator=random)
    return hidden, weight, targets, torch.randn(N, generator=random) * (torch.rand(N, generator=random) > 0.3)


@pytest.mark.parametrize("chunk_size", [1, 16, 40, N, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_equal_double_precision(chunk_size, temperature):
    hidden, weight, targets, grad = inputs(torch.float32)
    token_logprobs(hidden, weight, targets, temperature, chunk_size).backward(grad)
    hidden64, weight64 = (t.detach().double().requires_grad_() for t in (hidden, weight))
    whole = (hidden64 @ weight64.t() / temperature).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    whole.backward(grad.double())
    torch.testing.assert_close(
        token_logprobs(hidden, weight, targets, temperature, chunk_size).double(), whole, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(hidden.grad.double(), hidden64.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), weight64.grad, rtol=1e-5, atol=1e-5)


class Multiplied(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            self.dtypes.add(args[-1].dtype)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk_size", [32, 1000])
@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_equals_the_whole_tensors_operations(monkeypatch, chunk_size, fast):
    """Values to the bit (logits are rounded to bfloat16, then everything is float32), gradients to a rounding, in
    whichever dtype they are multiplied, in slices of 20 tokens.
    """
    monkeypatch.setattr(logprobs, "is_matmul_fast", lambda dtype: fast)
    monkeypatch.setitem(logprobs.VALUES, "cpu", 20 * H)
    hidden, weight, targets, grad = inputs(torch.bfloat16)
    with Multiplied() as multiplied:
        made = token_logprobs(hidden, weight, targets, 1.0, chunk_size)
        assert multiplied.dtypes == {torch.bfloat16}
        made.backward(grad)
    assert (torch.float32 in multiplied.dtypes) != fast
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    whole = (leaves[0] @ leaves[1].t()).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    whole.backward(grad)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, whole, rtol=0, atol=0 if chunk_size > N else 2**-6)
    for gradient, expected in ((hidden.grad, leaves[0].grad), (weight.grad, leaves[1].grad)):
        assert (gradient.float() - expected.float()).norm() < 2**-8 * expected.float().norm()


def test_a_negative_control_tells_temperatures_apart():
    hidden, weight, targets, _ = inputs(torch.float32)
    assert not torch.allclose(*(token_logprobs(hidden, weight, targets, t, 16) for t in (1.0, 0.99)), atol=1e-4)


RESTRICTIONS = [TokenFilter(5, 1.0), TokenFilter(None, 0.7), TokenFilter(20, 0.9), TokenFilter(1, 1.0)]


def vllms(logits: torch.Tensor, token_filter: TokenFilter) -> torch.Tensor:
    """Return logits [N, V] as vLLM's sampler filters them."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    n = len(logits)
    k = None if token_filter.top_k is None else torch.full((n,), token_filter.top_k)
    p = None if token_filter.top_p == 1 else torch.full((n,), token_filter.top_p)
    return apply_top_k_top_p_pytorch(logits.clone(), k, p)


@pytest.mark.parametrize("token_filter", RESTRICTIONS)
def test_the_selected_tokens_are_those_of_vllms_sampler(token_filter):
    hidden, weight, _, _ = inputs(torch.bfloat16)
    logits = (hidden @ weight.t()).float().detach()  # bfloat16 values: many are equal
    expected = vllms(logits, token_filter)
    targets = expected.argmax(-1)
    assert torch.equal(filter_logits(logits, targets, token_filter), expected)
    least = logits.argmin(-1)
    filtered = filter_logits(logits, least, token_filter)
    assert torch.equal(filtered.gather(1, least[:, None]), logits.gather(1, least[:, None]))
    filtered.scatter_(1, least[:, None], expected.gather(1, least[:, None]))
    assert torch.equal(filtered, expected)


@pytest.mark.parametrize("chunk_size", [1, 16, 40, 1000])
@pytest.mark.parametrize("token_filter", RESTRICTIONS)
def test_filtered_chunks_equal_the_softmax_of_selected_tokens(chunk_size, token_filter):
    hidden, weight, targets, grad = inputs(torch.float32)
    made = token_logprobs(hidden, weight, targets, 0.7, chunk_size, token_filter=token_filter)
    made.backward(grad)
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    logits = leaves[0] @ leaves[1].t() / 0.7
    selected = filter_logits(logits.detach(), targets, token_filter) > -torch.inf
    whole = logits.masked_fill(~selected, -torch.inf).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    whole.backward(grad)
    torch.testing.assert_close(made, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, leaves[0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, leaves[1].grad, rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Records, for each product with V columns, how many of the previous ones still existed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive_before: list[int] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is not torch.ops.aten.mm.default or args[1].size(1) != V:
            return operation(*args, **(kwargs or {}))
        self.alive_before.append(sum(logits() is not None for logits in self.made))
        product = operation(*args)
        self.made.append(weakref.ref(product))
        return product


@pytest.mark.parametrize("token_filter", [None, RESTRICTIONS[2]])
def test_one_chunks_logits_exist_at_a_time(token_filter):
    hidden, weight, targets, grad = inputs(torch.bfloat16)
    with Products() as products:
        token_logprobs(hidden, weight, targets, 1.0, 16, token_filter=token_filter).backward(grad)
    assert products.alive_before == [0] * 10  # five chunks, forward and backward


@pytest.mark.parametrize("chunk_size", [16, 40, 1000])
@pytest.mark.parametrize("token_filter", [None, RESTRICTIONS[2]])
def test_chunks_measure_the_sharpness_of_the_whole_and_change_no_bit(chunk_size, token_filter):
    hidden, weight, targets, grad = inputs(torch.bfloat16)
    measurement = Measurement(0.01, torch.full((N,), torch.nan))
    made, gradients = [], []
    for choice in (measurement, None):
        leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
        made.append(token_logprobs(*leaves, targets, 0.7, chunk_size, token_filter=token_filter, measurement=choice))
        made[-1].backward(grad)
        gradients.append([leaf.grad for leaf in leaves])
    assert torch.equal(*made)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    logits = (hidden @ weight.t()).detach().float() / 0.7
    if token_filter:
        logits = filter_logits(logits, targets, token_filter)
    expected = sharpness(logits, targets, 0.01)
    torch.testing.assert_close(measurement.values, expected, rtol=0 if chunk_size > N else 0.05, atol=1e-2)
    assert expected.max() > 1
