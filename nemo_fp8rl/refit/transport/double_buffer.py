"""The two ends of a link between processes: who may touch which buffer, told over the control connection.

    sender    b"M", nbytes (8 bytes, little-endian), header       message k is in buffer k mod 2
    receiver  b"R"                                                the oldest message is released

The buffers are the same memory on both sides, or the payload moves between them in `_give` and `_take`.
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
    """A SendingEnd. buffers: two of uint8 [capacity]."""

    def __init__(self, control: Control, buffers: Sequence[Tensor]) -> None:
        self._control, self._buffers = control, buffers
        self._sent = self._released = 0
        self._filling = False

    def has_free_buffer(self, within: float) -> bool:
        while self._sent - self._released == BUFFERS and self._control.readable(within):
            self._hear_release()
        return self._sent - self._released < BUFFERS

    def acquire_buffer(self) -> Tensor:
        while self._sent - self._released == BUFFERS or self._control.readable():
            self._hear_release()
        slot = self._sent % BUFFERS
        if not self._filling:
            self._reuse(slot)
            self._filling = True
        return self._buffers[slot]

    def send(self, header: bytes, nbytes: int) -> None:
        slot = self._sent % BUFFERS
        check_message(header, nbytes, len(self._buffers[slot]))
        assert self._filling, "send() follows buffer()"
        self._give(slot, self._buffers[slot][:nbytes])
        self._control.send(_MESSAGE.pack(b"M", nbytes) + header)
        self._filling = False
        self._sent += 1

    def close(self) -> None:
        self._control.close()

    def _hear_release(self) -> None:
        message = self._control.receive(len(_RELEASE))
        if message != _RELEASE or self._released == self._sent:
            self.close()
            raise LinkError(f"{self._control.other} said {message!r}, which releases nothing")
        self._released += 1

    def _reuse(self, slot: int) -> None:
        """Called when the receiver has released what `slot` held."""

    def _give(self, slot: int, payload: Tensor) -> None:
        """Begin to move the payload; it keeps its buffer until `_reuse`."""


class Receiver:
    """A ReceivingEnd. A thread reads ahead, so that the next payload moves while the caller applies the last."""

    def __init__(self, control: Control, buffers: Sequence[Tensor]) -> None:
        self._control, self._buffers = control, buffers
        self._arrived: SimpleQueue[tuple[bytes, Tensor] | LinkError] = SimpleQueue()  # an error is the last
        self._received = self._released = 0
        self._closed = False
        link_threads.start("refit link", self._read, self.close)

    def receive(self) -> tuple[bytes, Tensor]:
        if self._closed:
            raise LinkError(f"the link with {self._control.other} is closed")
        try:
            message = self._arrived.get(timeout=self._control.timeout)
        except Empty:
            raise LinkError(
                f"no message from {self._control.other} within {timeout_text(self._control.timeout)}"
            ) from None
        if isinstance(message, LinkError):
            self._arrived.put(message)
            raise LinkError(str(message))
        self._received += 1
        return message

    def release(self) -> None:
        assert self._released < self._received, "release() follows receive()"
        self._released += 1
        with suppress(LinkError):  # a sender that is gone reuses nothing; the next receive() says so
            self._control.send(_RELEASE)

    def close(self) -> None:
        self._closed = True
        self._control.close()
        self._arrived.put(LinkError(f"the link with {self._control.other} is closed"))

    def _read(self) -> None:
        count = 0
        try:
            while True:
                header, nbytes = self._parsed(self._control.receive(_MESSAGE.size + MAX_HEADER, forever=True))
                if count - self._released == BUFFERS:
                    raise LinkError(f"{self._control.other} sent into a buffer that is not released")
                slot = count % BUFFERS
                check_message(header, nbytes, len(self._buffers[slot]))
                payload = self._buffers[slot][:nbytes]
                self._take(slot, payload)
                self._arrived.put((header, payload))
                count += 1
        except LinkError as error:
            self._control.close()
            self._arrived.put(LinkError(str(error)))  # without the traceback, which keeps this end

    def _parsed(self, message: bytes) -> tuple[bytes, int]:
        if len(message) < _MESSAGE.size or not message.startswith(b"M"):
            raise LinkError(f"{self._control.other} said {message[:80]!r}, which is no message")
        _, nbytes = _MESSAGE.unpack_from(message)
        return message[_MESSAGE.size :], nbytes

    def _take(self, slot: int, payload: Tensor) -> None:
        """Fill the payload, in the reading thread."""
