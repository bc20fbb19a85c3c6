"""Digests of tensors on any device: 64 bits that detect damage, but not malice.

There are two kinds. On the host it is xxh3. A GPU has no use for a hash that reads in order: there it is a sum modulo
2**64 over words w of eight little-endian bytes. The last word is filled up with zeros; word i, counted from 0 in each
tensor, of tensor number t contributes

    mix(w xor (i + t * 2**40) * K)    mix(x): x *= A; x ^= x >> 32; x *= B; x ^= x >> 29

`mix` is one to one, so a single word that differs always changes the sum. The position of a word is part of the input
of `mix`, so words that change places change the sum, too. The maker of a digest takes the kind that belongs to the
device of the bytes; the checker takes the kind of the digest.

On a GPU with Triton one launch reads every byte of many tensors once (`fp8.kernels.triton_digest`). The formula in
torch is the specification, and serves other devices.
"""

import ctypes
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from nemo_fp8rl.fp8.kernels import load_triton

_signature = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view = _signature(("PyMemoryView_FromMemory", ctypes.pythonapi))
"""(address, bytes, PYBUF_READ) -> memoryview. numpy's view would forbid a sleeping engine to free the memory."""
PYBUF_READ = 0x100
WORD_SUM_PREFIX = "words:"
"""The beginning of every digest of the second kind."""
K, A, B = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
"""K is 2**64 over the golden ratio. All three are odd."""


def bytes_of(tensor: Tensor) -> Tensor:
    """Return uint8 [nbytes]; a view where the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def digest_of(*tensors: Tensor) -> str:
    """Return the digest of the tensors' bytes, one tensor after the other, of the kind for their device."""
    return word_sum_digest(*tensors) if any(tensor.is_cuda for tensor in tensors) else xxh3_digest(*tensors)


def has_digest(digest: str, *tensors: Tensor) -> bool:
    """Return True if this digest, of either kind, is that of the tensors; they may be on any device."""
    return digest == (word_sum_digest(*tensors) if digest.startswith(WORD_SUM_PREFIX) else xxh3_digest(*tensors))


def xxh3_digest(*tensors: Tensor) -> str:
    state = xxhash.xxh3_64()
    for tensor in tensors:
        on_host = tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.contiguous().cpu()
        if nbytes := on_host.nbytes:
            state.update(_memory_view(on_host.data_ptr(), nbytes, PYBUF_READ))
    return state.hexdigest()


def word_sum_digest(*tensors: Tensor) -> str:
    return format_word_sum(int(sum_contents([tensors])[0]))


def sum_words(*tensors: Tensor) -> Tensor:
    """Return the sum for `format_word_sum`, int64 [], on the tensors' device, by the formula; takes a few times their
    memory.
    """
    return torch.stack([_sum_mixed_words(tensor, number << 40) for number, tensor in enumerate(tensors)]).sum()


def sum_contents(contents: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Return `sum_words` of the tensors of each content, int64 [contents], on their device, without waiting for it.

    contents: at least one; all tensors on one device, unchanged until the work that is queued now is done
    """
    kernels = load_triton("triton_digest") if contents[0][0].is_cuda else None
    if kernels is None:
        return torch.stack([sum_words(*tensors) for tensors in contents])
    sums: Tensor = kernels.sum_contents(contents, (K, A, B))
    return sums


def format_word_sum(total: int) -> str:
    """Return the digest of the second kind for a sum of either sign."""
    return f"{WORD_SUM_PREFIX}{total % 2**64:016x}"


def _sum_mixed_words(tensor: Tensor, first: int) -> Tensor:
    """Return the sum, int64 [], over a tensor whose first word has the number `first`."""
    words = _as_words(tensor)
    mixed = torch.arange(first, first + len(words), device=words.device).mul_(_to_int64(K)).bitwise_xor_(words)
    for factor, shift in ((A, 32), (B, 29)):
        mixed.mul_(_to_int64(factor))
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 64 - shift) - 1))  # >> repeats the sign
    return mixed.sum()


def _as_words(tensor: Tensor) -> Tensor:
    """Return int64 [words]; a view where the alignment of the bytes allows it."""
    data = bytes_of(tensor)
    if len(data) % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(-(-len(data) // 8) * 8)
        padded[: len(data)] = data
        data = padded
    return data.view(torch.int64)


def _to_int64(number: int) -> int:
    """Return the int64 with the bits of this uint64."""
    return number - (1 << 64) if number >> 63 else number
