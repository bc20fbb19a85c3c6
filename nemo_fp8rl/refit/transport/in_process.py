"""A link between two threads of one process: the receiver reads the very buffers that the sender filled."""

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


def in_process_link(capacity: int, timeout: float, device: torch.device = HOST) -> tuple[SendingEnd, ReceivingEnd]:
    """The two ends. capacity: bytes of each buffer, allocated at first use. timeout: seconds that a wait lasts."""
    exchange = _Exchange(capacity, timeout, device)
    return _Sending(exchange), _Receiving(exchange)


class _Exchange:
    """What both ends share. Every change notifies `changed`."""

    def __init__(self, capacity: int, timeout: float, device: torch.device) -> None:
        self.capacity, self.timeout, self.device = capacity, timeout, device
        self.changed = Condition()
        self.waiting: deque[tuple[bytes, Tensor]] = deque()  # sent, not yet received
        self.sent = self.released = 0
        self.closed = False

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Call with `changed` held."""
        in_time = self.changed.wait_for(lambda: self.closed or ready(), self.timeout)
        if self.closed:
            raise LinkError("the link is closed")
        if not in_time:
            raise LinkError(f"no {what} within {timeout_text(self.timeout)}")

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class _Sending:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._buffers: list[Tensor] = []
        self._filling: Tensor | None = None

    def has_free_buffer(self, within: float) -> bool:
        link = self._exchange
        with link.changed:
            return link.changed.wait_for(lambda: link.closed or link.sent - link.released < BUFFERS, within)

    def acquire_buffer(self) -> Tensor:
        link = self._exchange
        with link.changed:
            link.wait_for(lambda: link.sent - link.released < BUFFERS, "free buffer")
            if len(self._buffers) == link.sent < BUFFERS:
                self._buffers.append(torch.empty(link.capacity, dtype=torch.uint8, device=link.device))
            self._filling = self._buffers[link.sent % BUFFERS]
        return self._filling

    def send(self, header: bytes, nbytes: int) -> None:
        link = self._exchange
        check_message(header, nbytes, link.capacity)
        assert self._filling is not None, "send() follows buffer()"
        with link.changed:
            if link.closed:
                raise LinkError("the link is closed")
            link.waiting.append((header, self._filling[:nbytes]))
            link.sent += 1
            link.changed.notify_all()
        self._filling = None

    def close(self) -> None:
        self._exchange.close()


class _Receiving:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._received = 0

    def receive(self) -> tuple[bytes, Tensor]:
        link = self._exchange
        with link.changed:
            link.wait_for(lambda: bool(link.waiting), "message")
            self._received += 1
            return link.waiting.popleft()

    def release(self) -> None:
        link = self._exchange
        with link.changed:
            assert link.released < self._received, "release() follows receive()"
            link.released += 1
            link.changed.notify_all()

    def close(self) -> None:
        self._exchange.close()
