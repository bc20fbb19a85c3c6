"""A link carries messages from one source rank to one sink rank through two buffers, so that both ends work at once.

The sender fills one buffer while the receiver applies the other. Whichever transport is below, message k lies in
buffer k mod 2, at most two messages are not yet released, and buffer() waits for the release of the one before last.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor

from nemo_fp8rl.refit.manifest import RefitError

ProcessTransport = Literal["shared_memory", "cuda_ipc", "nixl", "collective"]
"""How messages travel between processes."""
TransportChoice = ProcessTransport | Literal["nearest"]
"""nearest: memory that both ends have, of a GPU where the weights are on one and the sink can map it; collective where
they have none."""
BUFFERS = 2
HOST = torch.device("cpu")
MAX_HEADER = 16 << 20
"""Bytes of a header."""
SENDER_SHARE, RECEIVER_SHARE = 0.25, 0.75
"""Shares of the seconds after which an engine counts as hung: how long a source waits for one sink, and a sink for its
source, which may be waiting for other sinks. So one that hangs takes no other with it."""
GRACE = 10.0
"""Seconds that memory is kept after its link has ended: the other side, which uses it, too, may hear of that late."""


class LinkError(RefitError):
    """The other side is gone, silent, or said something that is not a message."""


def timeout_text(seconds: float) -> str:
    """The length of a wait, for an error, with the key that says it."""
    return f"{seconds:g} s, a share of cluster.engine_timeout_seconds"


class SendingEnd(Protocol):
    """Belongs to one thread, except close()."""

    def acquire_buffer(self) -> Tensor:
        """uint8 [capacity] to fill: the same one until send(). Waits until one of the two is free.

        Raises LinkError where the other side is gone or silent, or the link closed.
        """

    def has_free_buffer(self, within: float) -> bool:
        """Whether buffer() would not wait, or will not any more within so many seconds. Raises LinkError as it does."""

    def send(self, header: bytes, nbytes: int) -> None:
        """Hand over the first nbytes of the buffer from the last buffer() call, which are there: see `finish_gpu_work`.

        Raises LinkError as buffer() does.
        """

    def close(self) -> None:
        """End the link for both sides, whatever waits on either; what is under way may be lost. May be repeated."""


class ReceivingEnd(Protocol):
    """Belongs to one thread, except close()."""

    def receive(self) -> tuple[bytes, Tensor]:
        """Wait for the next message: its header and uint8 [nbytes], valid until its release().

        Raises LinkError where the other side is gone or silent, or the link closed.
        """

    def release(self) -> None:
        """The memory of the oldest message not yet released may be overwritten: see `finish_gpu_work`.

        A sender that is gone is no error.
        """

    def close(self) -> None:
        """End the link for both sides, whatever waits on either. May be repeated."""


def finish_gpu_work(buffer: Tensor) -> None:
    """Return when a GPU has done what this thread asked of it with a buffer there: links know nothing of streams."""
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()


def check_message(header: bytes, nbytes: int, capacity: int) -> None:
    """Raise LinkError unless a link of this capacity (bytes) can carry the message."""
    if len(header) > MAX_HEADER:
        raise LinkError(f"a header of {len(header)} bytes; a message carries at most {MAX_HEADER}")
    if not 0 <= nbytes <= capacity:
        raise LinkError(f"a payload of {nbytes} bytes in a bucket of {capacity}")
