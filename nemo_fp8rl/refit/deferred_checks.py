"""What a refit has to know of a piece's values: its digest, and whether they are finite.

On a CPU each number is read as soon as it is asked for, while the piece is in the cache. On a GPU to read one is to
wait until all that was asked of the GPU is done, and a mixture of experts has tens of thousands of pieces: there the
numbers of a message stay where they are, and one copy brings them before the message goes on or is given back.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8.format import is_finite
from nemo_fp8rl.refit.digest import WORD_SUM_PREFIX, format_word_sum, sum_words
from nemo_fp8rl.refit.message import Content

Refusal = Callable[[], Exception]
"""Makes the exception to raise. Not the exception itself, which would hold the frames that hold it."""


@dataclass
class PendingDigest:
    """The digest of a piece; empty until it is read, and where none is taken."""

    text: str = ""


class DeferredChecks:
    """What must be known of one message at a time. seconds: that digests took, and the wait for a GPU's numbers."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, Callable[[Any], None]]] = []
        self.seconds = 0.0

    def read(self, number: Tensor, use: Callable[[Any], None]) -> None:
        """number: int64 or float32 []. use: what to do with it, now or when the message ends; what it raises is raised
        there. It holds no tensors, which would stay in memory until then.
        """
        if on_gpu(number):
            self.asked.append((number, use))
        else:
            use(number.item())

    def check_finite(self, tensor: Tensor, refusal: Refusal) -> None:
        """Raise `refusal()` where a value is NaN or infinite."""
        if not on_gpu(tensor):
            if not is_finite(tensor):
                raise refusal()
            return

        def check(end: float) -> None:
            if not math.isfinite(end):
                raise refusal()

        for end in tensor.aminmax() if tensor.numel() else ():
            self.read(end.float(), check)

    def take_digest(self, content: Content) -> PendingDigest:
        """The content's digest, of the kind for where it is."""
        if not any(map(on_gpu, content.tensors)):
            return PendingDigest(content.digest)
        mark = PendingDigest()

        def set_text(total: int) -> None:
            mark.text = format_word_sum(total)

        self.read(sum_words(*content.tensors), set_text)
        return mark

    def check_digest(self, content: Content, digest: str, refusal: Refusal) -> None:
        """Raise `refusal()` where the digest, of either kind, is not that of the content."""

        def check(total: int) -> None:
            if format_word_sum(total) != digest:
                raise refusal()

        start = time.perf_counter()
        if digest.startswith(WORD_SUM_PREFIX):
            self.read(sum_words(*content.tensors), check)
        elif not content.matches(digest):
            raise refusal()
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """The message ends: use what a GPU still has, in the order in which it was asked for."""
        if not self.asked:
            return
        asked, self.asked = self.asked, []
        start = time.perf_counter()
        values = _read([number for number, _ in asked])
        self.seconds += time.perf_counter() - start
        for value, (_, use) in zip(values, asked, strict=True):
            use(value)


def on_gpu(tensor: Tensor) -> bool:
    """Whether to read a number of it waits."""
    return tensor.is_cuda


def _read(numbers: list[Tensor]) -> list[Any]:
    """Read the numbers of one device, by one copy."""
    kinds = {dtype: [number for number in numbers if number.dtype is dtype] for dtype in (torch.int64, torch.float32)}
    read = torch.cat([torch.stack(kind).view(torch.uint8) for kind in kinds.values() if kind]).cpu()
    end = 8 * len(kinds[torch.int64])  # the longer ones first, so that either lies for its type
    values = {torch.int64: iter(read[:end].view(torch.int64).tolist())}
    values[torch.float32] = iter(read[end:].view(torch.float32).tolist())
    return [next(values[number.dtype]) for number in numbers]
