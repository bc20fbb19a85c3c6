"""Both ends of a link between processes: messages on the control connection say which side may use which buffer.

    sender    b"M", nbytes (8 bytes, little-endian), header       message k is in buffer k mod 2
    receiver  b"R"                                                the oldest message is released
    receiver  b"O", {"version", "opens", "offer"}                 a load begins; the sink opens its places, or none;
                                                                  the offer of places comes once

The buffers are the same memory on both sides, or `_start_transfer` and `_fetch` move the payload between them.
"""

import json
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from nemo_fp8rl.refit.transport import link_threads
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.link import BUFFERS, MAX_HEADER, LinkError, check_message, timeout_text
from nemo_fp8rl.refit.transport.places import Offer, Places, Reach, read_offer

_MESSAGE = struct.Struct("<cQ")
_RELEASE, _OPENING = b"R", b"O"
MapMemory = Callable[[Any], Tensor | None]
"""Returns a memory of an offer as this process maps it, uint8 [nbytes], or None where it has no use of it.

Raises OSError or RuntimeError where it cannot be mapped."""


class Sender:
    """A `SendingEnd`.

    buffers:    two of uint8 [capacity]
    map_memory: maps memory of the sink; None where this process cannot reach it
    """

    def __init__(self, control: Control, buffers: Sequence[Tensor], map_memory: MapMemory | None = None) -> None:
        self._control, self._buffers, self._map_memory = control, buffers, map_memory
        self._num_sent = self._num_released = 0
        self._is_filling = False
        self._opened_version: int | None = None
        self._opens_places = False
        self._places: Places | None = None

    def has_free_buffer(self, within: float) -> bool:
        while self._num_sent - self._num_released == BUFFERS and self._control.is_readable(within):
            self._read_answer()
        return self._num_sent - self._num_released < BUFFERS

    def acquire_buffer(self) -> Tensor:
        while self._num_sent - self._num_released == BUFFERS or self._control.is_readable():
            self._read_answer()
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

    def wait_for_places(self, version: int) -> Places | None:
        if self._map_memory is None:
            return None
        while self._opened_version != version:
            self._read_answer()
        return self._places if self._opens_places else None

    def close(self) -> None:
        self._control.close()
        self._places = None  # which maps memory of the sink

    def _read_answer(self) -> None:
        message = self._control.receive(MAX_HEADER)
        if message.startswith(_OPENING):
            self._read_opening(message[len(_OPENING) :])
        elif message == _RELEASE and self._num_released < self._num_sent:
            self._num_released += 1
        else:
            self.close()
            raise LinkError(f"{self._control.peer} sent {message[:80]!r}, which releases nothing")

    def _read_opening(self, message: bytes) -> None:
        try:
            fields = json.loads(message)
            self._opened_version, self._opens_places = int(fields["version"]), bool(fields["opens"])
            if "offer" in fields:
                self._places = self._map_places(fields["offer"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.close()
            raise LinkError(f"{self._control.peer} offers places that are none ({error})") from None

    def _map_places(self, offer: Mapping[str, Any]) -> Places | None:
        if self._map_memory is None:
            return None
        try:
            memory = [self._map_memory(fields) for fields in offer["memory"]]
        except (OSError, RuntimeError) as error:
            logging.getLogger(__name__).warning(
                "%s: its weights go through buckets, because this rank cannot map its memory (%s)",
                self._control.peer,
                error,
            )
            return None
        mapped = [each for each in memory if each is not None]
        return read_offer(offer, mapped) if len(mapped) == len(memory) else None

    def _reclaim(self, slot: int) -> None:
        """Called when the receiver has released the message in `slot`."""

    def _start_transfer(self, slot: int, payload: Tensor) -> None:
        """Start to move the payload, which stays in its buffer until `_reclaim`."""


class Receiver:
    """A `ReceivingEnd`. A thread reads ahead, so that the next payload moves while the caller applies the last one."""

    def __init__(self, control: Control, buffers: Sequence[Tensor], reach: Reach | None = None) -> None:
        self._control, self._buffers, self.reach = control, buffers, reach
        self._offer: Offer | None = None  # which the source has
        self._messages: SimpleQueue[tuple[bytes, Tensor] | LinkError] = SimpleQueue()  # nothing follows an error
        self._num_received = self._num_released = 0
        self._is_closed = False
        link_threads.start("refit link", self._read, self.close)

    def open_places(self, version: int, offer: Offer | None) -> None:
        if self.reach is None:
            return
        if offer is not None and offer.reach != self.reach:
            offer = None
        fields: dict[str, Any] = {"version": version, "opens": offer is not None}
        if offer is not None and offer is not self._offer:
            self._offer = offer
            fields["offer"] = offer.fields
        with suppress(LinkError):  # the next receive() raises the error
            self._control.send(_OPENING + json.dumps(fields).encode())

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
