"""A window: a token sees the prompt and the last generated tokens; sums are vLLM's kernel's on these keys alone."""

import math
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.fp8 import KvScales
from nemo_fp8rl.policy.layers import aligned_layers
from nemo_fp8rl.policy.layers.aligned_layers import AlignedAttention
from nemo_fp8rl.policy.layers.attention import (
    CoreAttention,
    SdpaAttention,
    hidden_keys,
    make_attention_class,
    visible_keys,
)
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.rope import Rope
from nemo_fp8rl.policy.on_cpu import avx_attention
from nemo_fp8rl.policy.on_cpu.amx_matmul import tile_product
from tests.conftest import needs_vllms_fp8_cache
from tests.policy.ranks import logprobs_and_norm
from tests.policy.test_worker import new_worker, random_batch, train
from tests.vllms_attention import of_vllms_kernel

TOKENS, HEADS, GROUPS, HEAD_DIM, WINDOW = 60, 4, 2, 128, 7
PROMPTS = torch.tensor([5, 17, 40])


def make_attention(
    kind: type[CoreAttention] = AlignedAttention,
    window: int | None = WINDOW,
    dtype: torch.dtype = torch.bfloat16,
    cache: TrainerKvCache | None = None,
) -> CoreAttention:
    """Without a rotation, so that a key is the same at any position."""
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=HEADS, kv_channels=HEAD_DIM, params_dtype=dtype
    )
    return make_attention_class(kind, Rope(torch.zeros(HEAD_DIM // 2)), cache, window)(config, 1)


def random_inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Queries, keys and values, [tokens, sequences, heads or groups, head dim]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, len(PROMPTS), heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def kept(query: int, prompt: int, window: int = WINDOW) -> list[int]:
    """The keys that a query sees: the rule itself."""
    return [k for k in range(query + 1) if k < prompt or query - k < window]


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Masked attention in float64, [tokens, sequences, heads * head dim]."""
    mask = torch.zeros(len(PROMPTS), 1, TOKENS, TOKENS, dtype=torch.bool)
    for i, prompt in enumerate(PROMPTS.tolist()):
        for query in range(TOKENS):
            mask[i, 0, query, kept(query, prompt)] = True
    repeats = HEADS // GROUPS
    q64, k64, v64 = (x.double().repeat_interleave(1 if x is q else repeats, 2).permute(1, 2, 0, 3) for x in (q, k, v))
    scores = (q64 @ k64.mT / math.sqrt(HEAD_DIM)).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v64).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("window", [1, 7, 60])
def test_the_mask_is_the_rule(window):
    mask = visible_keys(hidden_keys(TOKENS, PROMPTS, window))
    for i, prompt in enumerate(PROMPTS.tolist()):
        for query in range(TOKENS):
            assert mask[i, query].nonzero().flatten().tolist() == kept(query, prompt, window)
    assert torch.equal(visible_keys(hidden_keys(TOKENS, PROMPTS, window), slice(20, 30)), mask[:, 20:30])


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (AlignedAttention, torch.float32, 1e-5),
        (SdpaAttention, torch.float32, 1e-5),
        (AlignedAttention, torch.bfloat16, 2e-2),
    ],
)
def test_values_and_gradients_are_those_of_a_mask(kind, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(AlignedAttention, "QUERY_BLOCK", 16)
    inputs = [x.requires_grad_() for x in random_inputs(dtype)]
    out, expected = make_attention(kind, dtype=dtype)(*inputs, PROMPTS), oracle(*inputs)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    for gradient, exact in zip(ours, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, exact, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("kind", [AlignedAttention, SdpaAttention])
def test_a_window_of_the_whole_length_is_dense_to_the_bit(kind):
    inputs = [x.requires_grad_() for x in random_inputs()]
    dense = make_attention(kind, None)(*inputs, None)
    expected = torch.autograd.grad(dense.sum(), inputs)
    for window, same in ((TOKENS, True), (TOKENS - int(PROMPTS.min()), True), (WINDOW, False)):
        out = make_attention(kind, window)(*inputs, PROMPTS)
        if kind is AlignedAttention or not same:  # torch has another kernel for a mask
            assert torch.equal(out, dense) is same, window
            gradients = torch.autograd.grad(out.sum(), inputs)
            assert all(map(torch.equal, gradients, expected)) is same, window
        else:
            torch.testing.assert_close(out, dense, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_are_those_of_the_visible_keys_alone(monkeypatch, fused, threads):
    """For both kernels of vLLM: what a query gets equals, to the bit, attention on a sequence of its keys."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: fused)
    monkeypatch.setattr(aligned_layers, "rounds_probabilities", lambda *_: False)
    monkeypatch.setattr(avx_attention, "THREAD_PRODUCTS", 1 if threads > 1 else 1 << 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    inputs, attention, dense = random_inputs(), make_attention(), make_attention(window=None)
    out = attention(*inputs, PROMPTS)
    for i, prompt in enumerate(PROMPTS.tolist()):
        for query in range(TOKENS):
            alone = dense(*(x[kept(query, prompt), i : i + 1] for x in inputs), None)
            assert torch.equal(out[query, i], alone[-1, 0]), (prompt, query)


@pytest.mark.parametrize("scales", [None, pytest.param((2.0**-6, 2.0**-5), marks=needs_vllms_fp8_cache)])
def test_a_query_gets_what_vllms_vector_kernel_computes_of_its_keys(monkeypatch, scales):
    monkeypatch.setattr(aligned_layers, "rounds_probabilities", lambda *_: False)
    cache = None
    if scales:
        cache = TrainerKvCache(1, "toward_zero")
        cache.scales = KvScales(scales[:1], scales[1:], (1.0,))
    inputs = random_inputs()
    out = make_attention(cache=cache)(*inputs, PROMPTS)
    for i, prompt in enumerate(PROMPTS.tolist()):
        for query in range(TOKENS):
            gathered = (x[kept(query, prompt), i] for x in inputs)
            expected = of_vllms_kernel("vec", *gathered, scales)[-1].flatten()
            assert torch.equal(out[query, i], expected), (prompt, query)


def test_tiles_have_the_visible_keys_alone():
    """32 products of a tile, its even and odd sums and what they lose are those of a product without hidden terms."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(shape, generator=generator).bfloat16().float() for shape in ((3, 1, 9, 90), (3, 1, 90, 5)))
    first = torch.randint(0, 60, (3, 1, 9), generator=generator)
    hidden = torch.stack((first, first + torch.randint(0, 31, first.shape, generator=generator)), -1)
    smallest, other = 1.5, False
    product = tile_product(a, b, smallest, hidden)
    for i in range(3):
        for row in range(9):
            start, end = hidden[i, 0, row].tolist()
            terms = [*range(start), *range(end, 90)]
            alone = tile_product(a[i, :, row, terms][:, None], b[i, :, terms], smallest)
            assert torch.equal(product[i, :, row], alone[:, 0]), (i, row)
            masked = a[i, :, row : row + 1].clone()
            masked[..., start:end] = 0
            other |= not torch.equal(tile_product(masked, b[i], smallest), alone)
    assert other  # tiles of all keys with zeros between are something else


def test_rounded_weights_have_tiles_of_the_visible_keys(monkeypatch):
    """As on a CPU with matrix units under an FP8 cache: sums below the smallest normal number are lost."""
    monkeypatch.setattr(aligned_layers, "rounds_probabilities", lambda *_: True)
    cache = TrainerKvCache(1, "toward_zero", loses_denormals=True)
    cache.scales = KvScales((2.0**-6,), (2.0**-2,), (1.0,))
    inputs = random_inputs()
    out = make_attention(cache=cache)(*inputs, PROMPTS)
    dense = make_attention(window=None, cache=cache)
    apart = 0
    for i, prompt in enumerate(PROMPTS.tolist()):
        for query in range(TOKENS):
            alone = dense(*(x[kept(query, prompt), i : i + 1] for x in inputs), None)
            apart += int((out[query, i] != alone[-1, 0]).sum())
    assert apart <= 1e-3 * out.numel()  # scores are of torch's matmul, whose order depends on the number of keys


KEYS = ("policy.generation.vllm_cfg.kv_window=4", "policy.max_total_sequence_length=20")


def windowed_batch(seed: int = 1, b: int = 16, t: int = 20) -> RolloutBatch:
    """Prompts of 3 tokens, or of 2."""
    batch = random_batch(seed, b, t)
    lengths = torch.full((b,), 3)
    lengths[::3] = 2
    return replace(batch, prompt_lengths=lengths)


def inside(batch: RolloutBatch) -> Tensor:
    return torch.arange(batch.input_ids.size(1)) < batch.input_lengths[:, None]


@pytest.mark.parametrize("precision", [("nemo_fp8rl.align=none",), ("nemo_fp8rl.align=vllm",)])
def test_only_tokens_beyond_the_window_have_other_logprobs(recipe, precision):
    """The query at position prompt + window is the first that lacks a key; its log-prob is of the token after it."""
    batch = windowed_batch()
    keys = ("nemo_fp8rl.kv=rollout",), ("policy.generation.vllm_cfg.kv_window=20",), ()
    dense, long, windowed = (new_worker(recipe(*KEYS, *precision, *more)).logprobs(batch) for more in keys)
    if precision[0].endswith("vllm"):
        assert torch.equal(long, dense)
    else:
        torch.testing.assert_close(long, dense, rtol=0, atol=2e-2)
    position, real = torch.arange(20), inside(batch)
    beyond = (position > batch.prompt_lengths[:, None] + 4) & real
    if precision[0].endswith("vllm"):
        assert torch.equal(windowed[real & ~beyond], dense[real & ~beyond])
    assert (windowed[beyond] != dense[beyond]).double().mean() > 0.9


def test_a_batch_without_prompt_lengths_is_refused_by_name(recipe):
    worker = new_worker(recipe(*KEYS))
    with pytest.raises(ValueError, match=r"prompt_lengths is None, and attention has a window of 4 generated tokens"):
        worker.logprobs(random_batch(1, 16, 20))


def test_the_reference_policy_sees_what_the_policy_sees(recipe):
    worker, batch = new_worker(recipe(*KEYS, "loss_fn.reference_policy_kl_penalty=0.1")), windowed_batch()
    assert torch.equal(worker.reference_logprobs(batch), worker.logprobs(batch))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_packed_sequences_equal_padded_sequences_to_the_bit(recipe, tmp_path, family):
    write_model(tmp_path / "model", family=family)
    base = (f"policy.model_name={tmp_path}/model", *KEYS, "policy.train_global_batch_size=16")
    base = (*base, "policy.train_micro_batch_size=16", "nemo_fp8rl.flow=bf16")
    pack = [f"policy.sequence_packing.{key}" for key in ("enabled=true", "train_mb_tokens=40", "logprob_mb_tokens=60")]
    batch = windowed_batch()
    padded, packed = new_worker(recipe(*base)), new_worker(recipe(*base, *pack))
    dense = new_worker(recipe(*base, "nemo_fp8rl.kv=rollout"))
    real = inside(batch)
    expected = padded.logprobs(batch)[real]
    assert torch.equal(packed.logprobs(batch)[real], expected)
    assert not torch.equal(dense.logprobs(batch)[real], expected)
    norms = [train(worker, batch)["grad_norm"] for worker in (padded, packed, dense)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert abs(norms[2] / norms[0] - 1) > 1e-2


@pytest.mark.parametrize(
    ("family", "layout", "is_packed"),
    [
        ("qwen3", ("context_parallel_size=2",), True),
        ("qwen3", ("context_parallel_size=2",), False),
        ("qwen3", ("pipeline_model_parallel_size=2", "activation_checkpointing=true"), True),
        ("qwen2", ("tensor_model_parallel_size=2", "sequence_parallel=true"), True),
        ("qwen3_moe", ("expert_model_parallel_size=2",), False),
    ],
    ids=["cp-packed", "cp", "pp-packed", "sp-packed", "ep"],
)
def test_ranks_that_share_the_model_see_the_same_keys(two, recipe, tmp_path, family, layout, is_packed):
    """In float32, where only the order of sums differs; sequence-parallel packing has one more sequence of padding."""
    write_model(tmp_path / "model", family=family, **({"num_key_value_heads": 2} if family == "qwen2" else {}))
    base = (f"policy.model_name={tmp_path}/model", *KEYS, "policy.train_global_batch_size=16")
    base = (*base, "policy.precision=float32", "nemo_fp8rl.flow=bf16", "policy.train_micro_batch_size=8")
    batch = windowed_batch()
    single = new_worker(recipe(*base))
    expected, metrics = single.logprobs(batch), train(single, batch)
    pack = [f"policy.sequence_packing.{key}" for key in ("enabled=true", "train_mb_tokens=40", "logprob_mb_tokens=60")]
    keys = ["cluster.backend=ray", "cluster.train_ranks=2", *(f"policy.megatron_cfg.{key}" for key in layout)]
    actual, norm = logprobs_and_norm(two, recipe(*base, *keys, *(pack if is_packed else ())), batch)
    real = inside(batch)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)
    assert norm == pytest.approx(metrics["grad_norm"], rel=1e-5)
