"""Both ends of a link between processes: messages on the control connection say which side may use which buffer.

    sender    b"M", nbytes (8 bytes, little-endian), header       message k is in buffer k mod 2
    receiver  b"R"                                                the oldest message is released

The buffers are the same memory on both sides, or `_start_transfer` and `_fetch` move the payload between them.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from torch import Tensor

from nemo_fp8rl.refit.transport import link_threads
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.link import BUFFERS, MAX_HEADER, LinkError, check_message, timeout_text

_MESSAGE = struct.Struct("<cQ")
_RELEASE = b"R"


class Sender:
    """A `SendingEnd`. buffers: two of uint8 [capacity]."""

    def __init__(self, control: Control, buffers: Sequence[Tensor]) -> None:
        self._control, self._buffers = control, buffers
        self._num_sent = self._num_released = 0
        self._is_filling = False

    def has_free_buffer(self, within: float) -> bool:
        while self._num_sent - self._num_released == BUFFERS and self._control.is_readable(within):
            self._read_release()
        return self._num_sent - self._num_released < BUFFERS

    def acquire_buffer(self) -> Tensor:
        while self._num_sent - self._num_released == BUFFERS or self._control.is_readable():
            self._read_release()
        slot = self._num_sent % BUFFERS
        if not self._is_filling:
            self._reclaim(slot)
            self._is_filling = True
        return self._buffers[slot]

    def send(self, header: bytes, nbytes: int) -> None:
        slot = self._num_sent % BUFFERS
        check_message(header, nbytes, len(self._buffers[slot]))
        assert self._is_filling, "send() follows acquire_buffer()"
        self._start_transfer(slot, self._buffers[slot][:nbytes])
        self._control.send(_MESSAGE.pack(b"M", nbytes) + header)
        self._is_filling = False
        self._num_sent += 1

    def close(self) -> None:
        self._control.close()

    def _read_release(self) -> None:
        message = self._control.receive(len(_RELEASE))
        if message != _RELEASE or self._num_released == self._num_sent:
            self.close()
            raise LinkError(f"{self._control.peer} sent {message!r}, which releases nothing")
        self._num_released += 1

    def _reclaim(self, slot: int) -> None:
        """Called when the receiver has released the message in `slot`."""

    def _start_transfer(self, slot: int, payload: Tensor) -> None:
        """Start to move the payload, which stays in its buffer until `_reclaim`."""


class Receiver:
    """A `ReceivingEnd`. A thread reads ahead, so that the next payload moves while the caller applies the last one."""

    def __init__(self, control: Control, buffers: Sequence[Tensor]) -> None:
        self._control, self._buffers = control, buffers
        self._messages: SimpleQueue[tuple[bytes, Tensor] | LinkError] = SimpleQueue()  # nothing follows an error
        self._num_received = self._num_released = 0
        self._is_closed = False
        link_threads.start("refit link", self._read, self.close)

    def receive(self) -> tuple[bytes, Tensor]:
        if self._is_closed:
            raise LinkError(f"the link with {self._control.peer} is closed")
        try:
            message = self._messages.get(timeout=self._control.timeout)
        except Empty:
            raise LinkError(
                f"no message from {self._control.peer} within {timeout_text(self._control.timeout)}"
            ) from None
        if isinstance(message, LinkError):
            self._messages.put(message)
            raise LinkError(str(message))
        self._num_received += 1
        return message

    def release(self) -> None:
        assert self._num_released < self._num_received, "release() follows receive()"
        self._num_released += 1
        with suppress(LinkError):  # a sender that is gone reuses nothing; the next receive() raises the error
            self._control.send(_RELEASE)

    def close(self) -> None:
        self._is_closed = True
        self._control.close()
        self._messages.put(LinkError(f"the link with {self._control.peer} is closed"))

    def _read(self) -> None:
        count = 0
        try:
            while True:
                header, nbytes = self._parse(self._control.receive(_MESSAGE.size + MAX_HEADER, forever=True))
                if count - self._num_released == BUFFERS:
                    raise LinkError(f"{self._control.peer} sent into a buffer that is not released")
                slot = count % BUFFERS
                check_message(header, nbytes, len(self._buffers[slot]))
                payload = self._buffers[slot][:nbytes]
                self._fetch(slot, payload)
                self._messages.put((header, payload))
                count += 1
        except LinkError as error:
            self._control.close()
            self._messages.put(LinkError(str(error)))  # without the traceback, which would keep this end alive

    def _parse(self, message: bytes) -> tuple[bytes, int]:
        if len(message) < _MESSAGE.size or not message.startswith(b"M"):
            raise LinkError(f"{self._control.peer} sent {message[:80]!r}, which is not a message")
        _, nbytes = _MESSAGE.unpack_from(message)
        return message[_MESSAGE.size :], nbytes

    def _fetch(self, slot: int, payload: Tensor) -> None:
        """Fill the payload, in the reading thread."""
