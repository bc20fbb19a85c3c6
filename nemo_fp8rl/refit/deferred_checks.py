"""Digests and finiteness checks of pieces: at once on a CPU, at the end of a message on a GPU.

On a CPU each number is read immediately, while the piece is in the cache. To read a number on a GPU is to wait until
the GPU has done all its work, and a mixture of experts has tens of thousands of pieces. There the numbers of a message
stay on the GPU, and one copy brings them to the host before the message is sent on or released. Digests are taken of
many pieces at a time, so that a launch is not paid for each.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import is_finite
from nemo_fp8rl.refit.digest import WORD_SUM_PREFIX, format_word_sum, sum_contents
from nemo_fp8rl.refit.message import Content

GROUP_BYTES = 1 << 27
"""Bytes of pieces of which digests are taken together: their memory is kept until then."""
ErrorFactory = Callable[[], Exception]
"""Makes the exception to raise. An exception object would keep alive the stack frames that keep it alive."""


@dataclass
class PendingDigest:
    """The digest of a piece. text: empty until the digest is read, and where no digest is taken."""

    text: str = ""


class DeferredChecks:
    """The checks of one message at a time. seconds: spent on digests and on waiting for a GPU's numbers."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Sequence[Callable[[Any], None]]]] = []
        """One-dimensional tensors, and what uses their numbers."""
        self._contents: list[tuple[tuple[Tensor, ...], Callable[[int], None]]] = []
        """The tensors of pieces without a digest yet, and what uses it."""
        self._content_bytes = 0
        self.seconds = 0.0

    def read(self, number: Tensor, use: Callable[[Any], None]) -> None:
        """Call `use` with the number: at once if it is on a CPU, in `finish` if it is on a GPU.

        number: int64 or float32 []
        use:    what it raises is raised by that call; it must not refer to tensors, which would stay in memory
        """
        if on_gpu(number):
            self._pending.append((number.view(1), [use]))
        else:
            use(number.item())

    def check_finite(self, tensor: Tensor, make_error: ErrorFactory) -> None:
        """Raise `make_error()` if a value is NaN or infinite."""
        if not on_gpu(tensor):
            if not is_finite(tensor):
                raise make_error()
            return

        def check(extreme: float) -> None:
            if not math.isfinite(extreme):
                raise make_error()

        for extreme in tensor.aminmax() if tensor.numel() else ():
            self.read(extreme.float(), check)

    def take_digest(self, content: Content) -> PendingDigest:
        """Return the content's digest, of the kind for its device.

        On a GPU the content must not change until `finish`.
        """
        if not any(map(on_gpu, content.tensors)):
            return PendingDigest(content.digest)
        digest = PendingDigest()

        def set_text(total: int) -> None:
            digest.text = format_word_sum(total)

        self._sum_later(content.tensors, set_text)
        return digest

    def check_digest(self, content: Content, digest: str, make_error: ErrorFactory) -> None:
        """Raise `make_error()` if the digest, of either kind, is not that of the content; as `take_digest` on a GPU."""

        def check(total: int) -> None:
            if format_word_sum(total) != digest:
                raise make_error()

        start = time.perf_counter()
        if digest.startswith(WORD_SUM_PREFIX) and any(map(on_gpu, content.tensors)):
            self._sum_later(content.tensors, check)
        elif not content.matches(digest):
            raise make_error()
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Read the numbers that are still on a GPU, at the end of a message, and use them."""
        start = time.perf_counter()
        self._sum_contents()
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        values = _read_numbers([numbers for numbers, _ in pending])
        self.seconds += time.perf_counter() - start
        for use, value in zip((use for _, uses in pending for use in uses), values, strict=True):
            use(value)

    def _sum_later(self, tensors: tuple[Tensor, ...], use: Callable[[int], None]) -> None:
        self._contents.append((tensors, use))
        self._content_bytes += sum(tensor.nbytes for tensor in tensors)
        if self._content_bytes >= GROUP_BYTES:
            self._sum_contents()

    def _sum_contents(self) -> None:
        """Take the digests that are due; the GPU works on them, and nothing waits."""
        if not self._contents:
            return
        contents, self._contents, self._content_bytes = self._contents, [], 0
        sums = sum_contents([tensors for tensors, _ in contents])
        self._pending.append((sums, [use for _, use in contents]))


def on_gpu(tensor: Tensor) -> bool:
    """Return True if reading a number of the tensor waits for a GPU."""
    return tensor.is_cuda


def _read_numbers(tensors: list[Tensor]) -> list[Any]:
    """Read the numbers, of one-dimensional tensors of one device, by one copy."""
    integers = [tensor for tensor in tensors if tensor.dtype is torch.int64]
    floats = [tensor for tensor in tensors if tensor.dtype is torch.float32]
    # the int64 come first, so that both kinds are aligned
    data = torch.cat([torch.cat(kind).view(torch.uint8) for kind in (integers, floats) if kind]).cpu()
    end = 8 * sum(map(len, integers))
    values = {torch.int64: iter(data[:end].view(torch.int64).tolist())}
    values[torch.float32] = iter(data[end:].view(torch.float32).tolist())
    return [next(values[tensor.dtype]) for tensor in tensors for _ in range(len(tensor))]
