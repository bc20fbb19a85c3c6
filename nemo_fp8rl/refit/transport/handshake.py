"""The start of a link: a source rank listens, sink ranks connect by name, and both prove that they know the token.

sink                                source
connect                             accept, one thread per caller
        <- both prove the token ->
{name, domain}                   -> waits under this name; a later caller with the same name replaces it
                                    accept(name, capacity)
                                 <- {transport, capacity}
        <- messages of the transport ->
                                 <- {transport, capacity}, once more if the sink cannot map a GPU's memory
"""

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from nemo_fp8rl.refit.transport import collective, cuda_ipc, nixl, shared_memory
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.link import (
    HOST,
    LinkError,
    ProcessTransport,
    ReceivingEnd,
    SendingEnd,
    TransportChoice,
    timeout_text,
)

GREETINGS, GREETING_SECONDS = 64, 10.0
"""At most so many unauthenticated connections exist at a time, and each is dropped after so many seconds. A caller that
does not know the token gets no more of this process."""


class Listener:
    """Accepts the connections of sinks on one address.

    A caller without the token, or a silent one, is dropped; it delays nobody else.

    transport: the transport of the links
    host:      the address to listen on, and no other
    token:     the run's token
    timeout:   seconds that each wait may last, in the handshake and on the links
    device:    the device of the weights
    """

    def __init__(
        self, transport: TransportChoice, host: str, token: str, timeout: float, device: torch.device = HOST
    ) -> None:
        if not token:
            raise ValueError("the run's token is empty: anyone could send weights")
        self._transport, self._token, self._timeout, self._device = transport, token, timeout, device
        self._host, self._store_lock = host, threading.Lock()
        self._store: dist.TCPStore | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._greetings = threading.BoundedSemaphore(GREETINGS)
        self._callers: dict[str, _Caller] = {}
        self._callers_changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._accept_callers, name="refit listener", daemon=True).start()

    def accept(self, name: str, capacity: int) -> SendingEnd:
        """Wait until the sink of this name connects, and return the link's end.

        With transport "nearest", a sink that cannot map the memory of this rank's GPU gets shared memory; a warning is
        logged.

        capacity: bytes of each of the two buffers
        Raises:   LinkError if the sink does not connect or leaves, RefitError without memory for the buffers
        """
        if capacity < 1:
            raise ValueError(f"a bucket of {capacity} bytes")
        control, domain = self._wait_for_caller(name)
        try:
            return self._make_link(control, domain, capacity)
        except Exception as error:
            control.refuse(error)
            raise

    def close(self) -> None:
        """Stop to listen. Links that exist are not closed."""
        with self._callers_changed:
            self._is_closed = True
            self._callers_changed.notify_all()
            callers = list(self._callers.values())
            self._callers.clear()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._socket.close()
        for caller in callers:
            caller.control.close()

    def _make_link(self, control: Control, domain: str, capacity: int) -> SendingEnd:
        try:
            return self._offer(self._choose_transport(domain), control, capacity)
        except cuda_ipc.MappingError as error:
            if self._transport != "nearest":
                raise LinkError(f"{error}: {cuda_ipc.ALTERNATIVES}") from None
            reason = str(error)
        logging.getLogger(__name__).warning("%s: its weights go through the host's shared memory", reason)
        return self._offer("shared_memory", control, capacity)

    def _offer(self, transport: ProcessTransport, control: Control, capacity: int) -> SendingEnd:
        control.send_fields(transport=transport, capacity=capacity)
        match transport:
            case "shared_memory":
                return shared_memory.offer(control, capacity)
            case "cuda_ipc":
                return cuda_ipc.offer(control, capacity, self._device)
            case "nixl":
                return nixl.offer(control, capacity, self._device)
            case "collective":
                store = self._collective_store()
                return collective.offer(control, capacity, store, store.port)

    def _choose_transport(self, domain: str) -> ProcessTransport:
        if self._transport != "nearest":
            return self._transport
        if domain != shared_memory.domain():
            return "collective"
        return "cuda_ipc" if self._device.type == "cuda" else "shared_memory"

    def _collective_store(self) -> dist.TCPStore:
        with self._store_lock:
            if self._store is None:
                self._store = collective.listen(self._host, self._timeout)
            return self._store

    def _wait_for_caller(self, name: str) -> "_Caller":
        deadline = time.monotonic() + self._timeout
        with self._callers_changed:
            while True:
                in_time = self._callers_changed.wait_for(
                    lambda: self._is_closed or name in self._callers, deadline - time.monotonic()
                )
                if self._is_closed:
                    raise LinkError("the listener is closed")
                if not in_time:
                    raise LinkError(f"{name} did not connect within {timeout_text(self._timeout)}")
                caller = self._callers.pop(name)
                with suppress(LinkError):
                    if not caller.control.is_readable():  # else its process died while it waited; it may connect again
                        return caller

    def _accept_callers(self) -> None:
        while not self._is_closed:
            self._greetings.acquire()  # further callers wait in the socket's backlog
            connection = None
            try:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._greet, args=(connection,), name="refit caller", daemon=True).start()
            except (OSError, RuntimeError):  # the socket is closed, or there is no descriptor or thread at the moment
                self._greetings.release()
                if connection is not None:
                    connection.close()
                time.sleep(0.05)

    def _greet(self, connection: socket.socket) -> None:
        try:
            self._register_caller(connection)
        finally:
            self._greetings.release()

    def _register_caller(self, connection: socket.socket) -> None:
        try:
            control = Control(connection, self._timeout, "the caller")
        except OSError:  # the caller is gone already
            connection.close()
            return
        deadline = threading.Timer(min(self._timeout, GREETING_SECONDS), control.close)
        deadline.daemon = True
        try:
            deadline.start()
            control.authenticate(self._token, is_caller=False)
            greeting = control.receive_fields(name=str, domain=str)
        except (LinkError, RuntimeError):  # RuntimeError: no thread for the timer
            control.close()
            return
        finally:
            deadline.cancel()
        name, caller = greeting["name"], _Caller(control, greeting["domain"])
        control.peer = name
        with self._callers_changed:
            replaced_caller = caller if self._is_closed else self._callers.get(name)
            if not self._is_closed:
                self._callers[name] = caller
                self._callers_changed.notify_all()
        if replaced_caller is not None:
            replaced_caller.control.close()


class _Caller(NamedTuple):
    control: Control
    domain: str


def connect(
    address: tuple[str, int], token: str, name: str, timeout: float, device: torch.device = HOST
) -> ReceivingEnd:
    """Connect to a source's `Listener`, wait until it accepts `name`, and return the link's end.

    address: the listener's address
    token:   the run's token
    timeout: seconds that each wait may last
    device:  the device of the weights in this process
    Raises:  LinkError if the source is not there, has another token, or does not accept in time
    """
    source = f"the source at {address[0]}:{address[1]}"
    try:
        control = Control(socket.create_connection(address, timeout), timeout, source)
    except OSError as error:
        raise LinkError(f"cannot reach {source} ({error})") from None
    try:
        control.authenticate(token, is_caller=True)
        control.send_fields(name=name, domain=shared_memory.domain())
        while True:
            if (end := _take_offer(control, device)) is not None:
                return end
    except Exception as error:
        control.refuse(error)
        raise


def _take_offer(control: Control, device: torch.device) -> ReceivingEnd | None:
    """Make the link that the source offers; None if the source will offer another transport."""
    offer = control.receive_fields(transport=str, capacity=int)
    transport, capacity = offer["transport"], offer["capacity"]
    if capacity < 1:
        raise LinkError(f"{control.peer} offers {offer}, which is not a link")
    match transport:
        case "shared_memory":
            return shared_memory.take(control, capacity)
        case "cuda_ipc":
            return cuda_ipc.take(control, capacity, device)
        case "nixl":
            return nixl.take(control, capacity, device)
        case "collective":
            return collective.take(control, capacity)
    raise LinkError(f"{control.peer} offers {offer}, a transport that this process does not know")
