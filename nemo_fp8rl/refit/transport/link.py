"""The interface of a link: it carries messages from one source rank to one sink rank through two buffers.

Both ends work at once: the sender fills one buffer while the receiver applies the other. On every transport, message k
is in buffer k mod 2, at most two messages are not yet released, and `acquire_buffer` waits for the release of the
message before the last one.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport.places import Offer, Places, Reach

ProcessTransport = Literal["shared_memory", "cuda_ipc", "nixl", "collective"]
"""A way for messages between processes."""
TransportChoice = ProcessTransport | Literal["nearest"]
"""nearest: chosen for each link. Between machines it is collective. Within one machine it is cuda_ipc if the weights
are on a GPU whose memory the sink can map, else shared_memory."""
BUFFERS = 2
HOST = torch.device("cpu")
MAX_HEADER = 16 << 20
"""The largest header, in bytes."""
SENDER_SHARE, RECEIVER_SHARE = 0.25, 0.75
"""Shares of the seconds after which an engine counts as hung. A source waits the first share for one sink. A sink waits
the second for its source, which may be waiting for other sinks. So an engine that hangs takes no other with it."""
GRACE = 10.0
"""Seconds for which memory is kept after the link's end: the other side uses it, too, and may notice the end late."""


class LinkError(RefitError):
    """The other side is gone or silent, or it sent something that is not a message."""


TIMEOUT_KEY = "a share of cluster.engine_timeout_seconds"
"""What sets the length of a wait, in the words of an error message."""


def timeout_text(seconds: float) -> str:
    """Return the length of a wait for an error message, with the key that sets it."""
    return f"{seconds:g} s, {TIMEOUT_KEY}"


class SendingEnd(Protocol):
    """The source's end of a link. It belongs to one thread, except `close`."""

    def acquire_buffer(self) -> Tensor:
        """Return the buffer to fill, uint8 [capacity]; the same one until `send`. Waits until one of the two is free.

        Raises: LinkError if the other side is gone or silent, or if the link is closed
        """

    def has_free_buffer(self, within: float) -> bool:
        """Return True if a buffer is free, or will be within so many seconds. Raises LinkError as `acquire_buffer`."""

    def send(self, header: bytes, nbytes: int) -> None:
        """Send the first nbytes of the buffer from `acquire_buffer`; a GPU has written them (`finish_gpu_work`).

        Raises: LinkError as `acquire_buffer`
        """

    def wait_for_places(self, version: int) -> Places | None:
        """Wait until the sink has begun to load a version, and return the places that may be written with it.

        They may be written until the version's last message is sent, or the link is closed. None where the sink opens
        no places, or this process does not reach its memory; there is nothing to wait for then on most transports.

        Raises: LinkError as `acquire_buffer`
        """

    def close(self) -> None:
        """End the link for both sides, even if one of them waits. Messages in flight may be lost. May be repeated."""


class ReceivingEnd(Protocol):
    """The sink's end of a link. It belongs to one thread, except `close`.

    reach: the memory of the sink that the source reaches, or None
    """

    reach: Reach | None

    def open_places(self, version: int, offer: Offer | None) -> None:
        """Tell the source that the load of a version begins, and which places may be written with it; None: none.

        A source that is gone is not an error.
        """

    def receive(self) -> tuple[bytes, Tensor]:
        """Wait for the next message. Return its header and its payload, uint8 [nbytes], valid until its `release`.

        Raises: LinkError if the other side is gone or silent, or if the link is closed
        """

    def release(self) -> None:
        """Allow the sender to overwrite the oldest message that is not yet released; a GPU has read it.

        A sender that is gone is not an error.
        """

    def close(self) -> None:
        """End the link for both sides, even if one of them waits. May be repeated."""


def finish_gpu_work(buffer: Tensor) -> None:
    """Wait until the GPU of a buffer has done the work that this thread queued; links know nothing of streams."""
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()


def check_message(header: bytes, nbytes: int, capacity: int) -> None:
    """Raise LinkError unless a link of this capacity, in bytes, can carry the message."""
    if len(header) > MAX_HEADER:
        raise LinkError(f"a header of {len(header)} bytes; a message carries at most {MAX_HEADER}")
    if not 0 <= nbytes <= capacity:
        raise LinkError(f"a payload of {nbytes} bytes in a bucket of {capacity}")
