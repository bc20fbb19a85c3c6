"""Codes of an FP8 KV cache on Triton's interpreter: those of the formula, in the pages that their slots name."""

import pytest
import torch

from nemo_fp8rl.fp8 import from_cache, to_cache
from nemo_fp8rl.ops.attention import BLOCK_KEYS, attention
from nemo_fp8rl.ops.kv_pages import write_pages
from nemo_fp8rl.policy.layers.shared_ops.attention import SequenceAttention, attend_by_shared_kernel
from tests.gpu_engine.test_attention import GROUPS, D, ask, sequence
from tests.gpu_engine.test_ops import values

SCALES = (2.0**-7, 2.0**-5)
"""Of keys, of which some are cut off at 448 codes, and of values."""


def test_every_bfloat16_gets_the_code_of_the_formula():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    x = torch.nn.functional.pad(x, (0, -len(x) % 2**7)).view(-1, 1, 2**7)
    for scale in (2.0**-9, 2.0**4, 0.0123):
        codes = torch.zeros(2, len(x), 1, 1, 2**7, dtype=torch.float8_e4m3fn)
        write_pages(x, x, codes[0], codes[1], torch.arange(len(x)), torch.tensor([scale]), torch.tensor([1.0]))
        divided = (x.float() / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        for got, expected in zip(codes, (divided, to_cache(x, 1.0, "nearest")), strict=True):
            assert torch.equal(got.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))
        if scale != 0.0123:
            assert torch.equal(divided.view(torch.uint8), to_cache(x, scale, "nearest").view(torch.uint8))


def test_nan_stays_nan():
    x, codes = torch.full((1, 1, 16), torch.nan), torch.zeros(2, 1, 1, 1, 16, dtype=torch.float8_e4m3fn)
    write_pages(x, x, codes[0], codes[1], torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.ones(1))
    assert codes.float().isnan().all()


def test_tokens_go_to_their_slots_and_padding_to_none():
    """In vLLM's layout, which has keys and values of a head side by side, and more tokens than slots."""
    tokens, page_size, d = 70, 16, 32
    key, value = values(tokens, 3, d), values(tokens, 3, d, seed=1)
    cache = torch.zeros(8, 3, page_size, 2 * d, dtype=torch.uint8)
    pages = cache.view(torch.float8_e4m3fn).transpose(1, 2).split(d, -1)
    slots = torch.randperm(8 * page_size, generator=torch.Generator().manual_seed(0))[: tokens - 2]
    slots[[3, 50]] = -1
    write_pages(key, value, *pages, slots, *(torch.tensor(scale) for scale in SCALES))
    written = slots[slots >= 0]
    for codes, x, scale in zip(pages, (key, value), SCALES, strict=True):
        got = codes.contiguous().view(torch.uint8).flatten(0, 1)
        expected = to_cache(x[: len(slots)][slots >= 0], scale, "nearest").view(torch.uint8)
        assert torch.equal(got[written], expected)
        untouched = torch.ones(len(got), dtype=torch.bool)
        untouched[written] = False
        assert (got[untouched] == 0).all()


def test_the_trainer_reads_its_codes_as_an_engine_does_and_gradients_pass_through():
    length = BLOCK_KEYS + 6
    leaves = [t.requires_grad_() for t in sequence(length, 4, 1)]
    q, k, v = leaves
    out = SequenceAttention.apply(attend_by_shared_kernel, q, k, v, 1, D**-0.5, SCALES)
    ((expected, _),) = ask([[t.detach() for t in leaves]], [length], [length], 16, SCALES)
    assert torch.equal(out, expected)
    grad = values(length, 4, D, seed=9)
    read = [from_cache(to_cache(t.detach(), s, "nearest"), s, t.dtype) for t, s in zip((k, v), SCALES, strict=True)]
    others = [t.detach().requires_grad_() for t in (q, *read)]
    assert not torch.equal(others[1], k)
    dense = SequenceAttention.apply(attend_by_shared_kernel, *others, 1, D**-0.5)
    assert torch.equal(dense, out)
    gradients = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(dense, others, grad)
    assert all(map(torch.equal, *gradients))


def test_what_would_be_read_wrongly_is_refused():
    q, k, v = sequence(5, 2, 1)
    codes = to_cache(k, 1.0, "nearest")
    tokens = torch.arange(5, dtype=torch.int32)[None], torch.tensor([0, 5]).int(), torch.tensor([5]).int(), 0.2
    with pytest.raises(ValueError, match=r"keys torch\.float8_e4m3fn, values torch\.bfloat16, without"):
        attention(q, codes[:, None], v[:, None], *tokens)
    with pytest.raises(ValueError, match=r"values torch\.bfloat16, with scales"):
        attention(q, k[:, None], v[:, None], *tokens, torch.ones(1), torch.ones(1))
    transposed = torch.zeros(5, 1, D, GROUPS, dtype=torch.float8_e4m3fn).mT
    with pytest.raises(ValueError, match="side by side in memory"):
        write_pages(k, v, transposed, transposed, torch.arange(5), torch.ones(1), torch.ones(1))
