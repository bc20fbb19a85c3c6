"""A link between two threads of one process: the receiver reads the same buffers that the sender filled."""

from collections import deque
from collections.abc import Callable
from threading import Condition

import torch
from torch import Tensor

from nemo_fp8rl.refit.transport.link import (
    BUFFERS,
    HOST,
    LinkError,
    ReceivingEnd,
    SendingEnd,
    check_message,
    timeout_text,
)
from nemo_fp8rl.refit.transport.places import Offer, Places, Reach


def in_process_link(capacity: int, timeout: float, device: torch.device = HOST) -> tuple[SendingEnd, ReceivingEnd]:
    """Make a link and return its two ends.

    capacity: bytes of each buffer, which is allocated at its first use
    timeout:  seconds that a wait lasts
    device:   the device of the buffers
    """
    exchange = _Exchange(capacity, timeout, device)
    return _SendingEnd(exchange), _ReceivingEnd(exchange)


class _Exchange:
    """The state that both ends share. Every change notifies `changed`."""

    def __init__(self, capacity: int, timeout: float, device: torch.device) -> None:
        self.capacity, self.timeout, self.device = capacity, timeout, device
        self.changed = Condition()
        self.unread: deque[tuple[bytes, Tensor]] = deque()
        self.num_sent = self.num_released = 0
        self.opened: tuple[int | None, Places | None] = None, None  # (version, places)
        self.is_closed = False

    def has_free_buffer(self) -> bool:
        return self.num_sent - self.num_released < BUFFERS

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the condition. The caller has locked `changed`. what: the missing thing, for the error."""
        in_time = self.changed.wait_for(lambda: self.is_closed or condition(), self.timeout)
        if self.is_closed:
            raise LinkError("the link is closed")
        if not in_time:
            raise LinkError(f"no {what} within {timeout_text(self.timeout)}")

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class _SendingEnd:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._buffers: list[Tensor] = []
        self._buffer: Tensor | None = None  # the one that is being filled

    def has_free_buffer(self, within: float) -> bool:
        link = self._exchange
        with link.changed:
            return link.changed.wait_for(lambda: link.is_closed or link.has_free_buffer(), within)

    def acquire_buffer(self) -> Tensor:
        link = self._exchange
        with link.changed:
            link.wait_for(link.has_free_buffer, "free buffer")
            if len(self._buffers) == link.num_sent < BUFFERS:
                self._buffers.append(torch.empty(link.capacity, dtype=torch.uint8, device=link.device))
            self._buffer = self._buffers[link.num_sent % BUFFERS]
        return self._buffer

    def send(self, header: bytes, nbytes: int) -> None:
        link = self._exchange
        check_message(header, nbytes, link.capacity)
        assert self._buffer is not None, "send() follows acquire_buffer()"
        with link.changed:
            if link.is_closed:
                raise LinkError("the link is closed")
            link.unread.append((header, self._buffer[:nbytes]))
            link.num_sent += 1
            link.changed.notify_all()
        self._buffer = None

    def wait_for_places(self, version: int) -> Places | None:
        link = self._exchange
        with link.changed:
            link.wait_for(lambda: link.opened[0] == version, "load")
            return link.opened[1]

    def close(self) -> None:
        self._exchange.close()


class _ReceivingEnd:
    reach: Reach | None = "process"

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._num_received = 0

    def open_places(self, version: int, offer: Offer | None) -> None:
        link = self._exchange
        with link.changed:
            link.opened = version, offer.places if offer is not None else None
            link.changed.notify_all()

    def receive(self) -> tuple[bytes, Tensor]:
        link = self._exchange
        with link.changed:
            link.wait_for(lambda: bool(link.unread), "message")
            self._num_received += 1
            return link.unread.popleft()

    def release(self) -> None:
        link = self._exchange
        with link.changed:
            assert link.num_released < self._num_received, "release() follows receive()"
            link.num_released += 1
            link.changed.notify_all()

    def close(self) -> None:
        self._exchange.close()
