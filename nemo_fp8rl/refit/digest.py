"""Digests of what memory holds, wherever it is: 64 bits that tell damage, not malice.

On the host xxh3. On a GPU, which has no use for a hash that reads in order, a sum modulo 2**64 over the words w of
eight little-endian bytes, the last filled up with zeros, i counted from 0 in each tensor, tensor number t:

    mix(w xor (i + t * 2**40) * K)    mix(x): x *= A; x ^= x >> 32; x *= B; x ^= x >> 29

`mix` is one to one, so a single word that differs always shows; the place of a word is part of what is mixed, so words
that change places do, too. Whoever makes a digest takes the kind of where its bytes are, and whoever checks one takes
the kind of the digest.
"""

import ctypes

import torch
import xxhash
from torch import Tensor

_signature = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory = _signature(("PyMemoryView_FromMemory", ctypes.pythonapi))
"""(address, bytes, READ) -> memoryview. Not numpy, which would forbid a sleeping engine to free the memory."""
READ = 0x100
"""PyBUF_READ."""
WORD_SUM_PREFIX = "words:"
"""What digests of the second kind begin with."""
K, A, B = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
"""K: 2**64 over the golden ratio. All odd."""


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [nbytes]; a view of a contiguous tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def digest_of(*tensors: Tensor) -> str:
    """The digest of the tensors' bytes, one tensor after the other; of the kind for where these are."""
    return word_sum_digest(*tensors) if any(tensor.is_cuda for tensor in tensors) else xxh3_digest(*tensors)


def has_digest(digest: str, *tensors: Tensor) -> bool:
    """Whether these tensors, anywhere, hold what the digest is of."""
    return digest == (word_sum_digest(*tensors) if digest.startswith(WORD_SUM_PREFIX) else xxh3_digest(*tensors))


def xxh3_digest(*tensors: Tensor) -> str:
    state = xxhash.xxh3_64()
    for tensor in tensors:
        held = tensor.contiguous().cpu()
        if nbytes := held.nbytes:
            state.update(_memory(held.data_ptr(), nbytes, READ))
    return state.hexdigest()


def word_sum_digest(*tensors: Tensor) -> str:
    return format_word_sum(int(sum_words(*tensors)))


def sum_words(*tensors: Tensor) -> Tensor:
    """int64 [], computed where the tensors are, for `format_word_sum`; takes a few times their memory meanwhile."""
    return torch.stack([_mixed(tensor, number << 40) for number, tensor in enumerate(tensors)]).sum()


def format_word_sum(total: int) -> str:
    """The digest of the second kind, of a sum with whatever sign."""
    return f"{WORD_SUM_PREFIX}{total % 2**64:016x}"


def _mixed(tensor: Tensor, first: int) -> Tensor:
    """int64 []: the sum over a tensor whose first word has the number `first`."""
    taken = _words(tensor)
    mixed = torch.arange(first, first + len(taken), device=taken.device).mul_(_signed(K)).bitwise_xor_(taken)
    for factor, shift in ((A, 32), (B, 29)):
        mixed.mul_(_signed(factor))
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 64 - shift) - 1))  # >> repeats the sign
    return mixed.sum()


def _words(tensor: Tensor) -> Tensor:
    """int64 [words]: a view where the bytes lie for it."""
    taken = bytes_of(tensor)
    if len(taken) % 8 or taken.storage_offset() % 8:
        filled = taken.new_zeros(-(-len(taken) // 8) * 8)
        filled[: len(taken)] = taken
        taken = filled
    return taken.view(torch.int64)


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    return number - (1 << 64) if number >> 63 else number
