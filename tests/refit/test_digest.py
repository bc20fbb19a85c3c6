"""The two kinds of digests, on bytes of any length, alignment and device."""

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.refit.digest import WORD_SUM_PREFIX, A, B, K, digest_of, has_digest, word_sum_digest

KINDS = pytest.mark.parametrize("digest", [digest_of, word_sum_digest], ids=["host", "GPU"])


def tensor(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def as_documented(*contents: bytes) -> str:
    """The module's formula, in Python's integers."""
    total = 0
    for number, content in enumerate(contents):
        filled = content + bytes(-len(content) % 8)
        for i in range(len(filled) // 8):
            x = int.from_bytes(filled[8 * i : 8 * i + 8], "little") ^ ((i + (number << 40)) * K % 2**64)
            for factor, shift in ((A, 32), (B, 29)):
                x = x * factor % 2**64
                x ^= x >> shift
            total += x
    return f"{WORD_SUM_PREFIX}{total % 2**64:016x}"


@given(st.lists(st.binary(max_size=70), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_both_are_what_is_written(contents):
    tensors = [tensor(content) for content in contents]
    assert digest_of(*tensors) == xxhash.xxh3_64(b"".join(contents)).hexdigest()
    assert word_sum_digest(*tensors) == as_documented(*contents)
    assert has_digest(digest_of(*tensors), *tensors)
    assert has_digest(word_sum_digest(*tensors), *tensors)


@KINDS
def test_a_bit_a_place_and_an_end_show(digest):
    content = torch.randint(256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {digest(content)}
    for at in range(len(content)):
        for bit in range(8):
            other = content.clone()
            other[at] ^= 1 << bit
            seen.add(digest(other))
    for at in range(0, len(content) - 8, 8):
        other = content.clone()
        other[at : at + 8], other[at + 8 : at + 16] = content[at + 8 : at + 16], content[at : at + 8]
        seen.add(digest(other))
    assert len(seen) == 1 + 1000 * 8 + 124
    zeros = torch.zeros(64, dtype=torch.uint8)
    assert len({digest(zeros[:n], zeros[n:]) for n in range(0, 65, 8)}) == (1 if digest is digest_of else 9)


@KINDS
def test_it_is_of_the_values_wherever_they_lie(digest):
    values = torch.randn(40, 33, generator=torch.Generator().manual_seed(1))
    padded, shifted = torch.zeros(50, 70), torch.zeros(40 * 33 + 1)
    padded[3:43, 5:38], shifted[1:] = values, values.flatten()  # not contiguous; at no multiple of eight bytes
    assert digest(values) == digest(padded[3:43, 5:38]) == digest(shifted[1:])
    assert digest(values.bfloat16()) != digest(values)


def test_a_digest_is_checked_by_its_own_kind():
    one, other = torch.arange(9.0), torch.arange(9.0) + 1
    for digest in (digest_of(one), word_sum_digest(one)):
        assert has_digest(digest, one)
        assert not has_digest(digest, other)
    assert not has_digest("", one)
