"""Where links begin: a source rank listens, sink ranks connect to it by name, and both prove that they know the token.

sink                                source
connect                             accept, one thread a caller
        <- both prove the token ->
{name, domain}                   -> waits under this name, the last caller of a name counts
                                    accept(name, capacity)
                                 <- {transport, capacity}
        <- what the transport needs ->
                                 <- {transport, capacity}, once more where the sink cannot map a GPU's memory
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
"""Callers that may be greeting at once, and for how long: who does not know the token gets no more of this process."""


class Listener:
    """Listens on `host` alone, at `address`. timeout: seconds of every wait here and on the links made here.
    device: of the weights.

    A caller without the token, or one that says nothing, is dropped and keeps nobody else waiting.
    """

    def __init__(
        self, transport: TransportChoice, host: str, token: str, timeout: float, device: torch.device = HOST
    ) -> None:
        if not token:
            raise ValueError("the run's token is empty: anyone could send weights")
        self._transport, self._token, self._timeout, self._device = transport, token, timeout, device
        self._host, self._listening = host, threading.Lock()
        self._store: dist.TCPStore | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._greeting = threading.BoundedSemaphore(GREETINGS)
        self._callers: dict[str, _Caller] = {}
        self._called = threading.Condition()
        self._closed = False
        threading.Thread(target=self._listen, name="refit post", daemon=True).start()

    def accept(self, name: str, capacity: int) -> SendingEnd:
        """The link to the sink of this name, with two buffers of `capacity` bytes; waits for its call.

        Raises LinkError where it does not call or leaves, RefitError where there is no memory for the buffers. The
        nearest is shared memory where the sink cannot map that of this rank's GPU, as the log then says.
        """
        if capacity < 1:
            raise ValueError(f"a bucket of {capacity} bytes")
        control, domain = self._caller(name)
        try:
            return self._linked(control, domain, capacity)
        except Exception as error:
            control.refuse(error)
            raise

    def close(self) -> None:
        """Take no calls from now on. Links that stand stay."""
        with self._called:
            self._closed = True
            self._called.notify_all()
            callers = list(self._callers.values())
            self._callers.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._listener.close()
        for caller in callers:
            caller.control.close()

    def _linked(self, control: Control, domain: str, capacity: int) -> SendingEnd:
        try:
            return self._offer(self._suited(domain), control, capacity)
        except cuda_ipc.Unmapped as error:
            if self._transport != "nearest":
                raise LinkError(f"{error}: {cuda_ipc.ELSE}") from None
            why = str(error)
        logging.getLogger(__name__).warning("%s: what it takes goes through the host's shared memory", why)
        return self._offer("shared_memory", control, capacity)

    def _offer(self, transport: ProcessTransport, control: Control, capacity: int) -> SendingEnd:
        control.say(transport=transport, capacity=capacity)
        match transport:
            case "shared_memory":
                return shared_memory.offer(control, capacity)
            case "cuda_ipc":
                return cuda_ipc.offer(control, capacity, self._device)
            case "nixl":
                return nixl.offer(control, capacity, self._device)
            case "collective":
                store = self._meeting()
                return collective.offer(control, capacity, store, store.port)

    def _suited(self, domain: str) -> ProcessTransport:
        if self._transport != "nearest":
            return self._transport
        if domain != shared_memory.domain():
            return "collective"
        return "cuda_ipc" if self._device.type == "cuda" else "shared_memory"

    def _meeting(self) -> dist.TCPStore:
        with self._listening:
            if self._store is None:
                self._store = collective.listen(self._host, self._timeout)
            return self._store

    def _caller(self, name: str) -> "_Caller":
        deadline = time.monotonic() + self._timeout
        with self._called:
            while True:
                in_time = self._called.wait_for(
                    lambda: self._closed or name in self._callers, deadline - time.monotonic()
                )
                if self._closed:
                    raise LinkError("the post is closed")
                if not in_time:
                    raise LinkError(f"{name} did not call within {timeout_text(self._timeout)}")
                caller = self._callers.pop(name)
                with suppress(LinkError):
                    if not caller.control.readable():  # else its process died while it waited, and may call again
                        return caller

    def _listen(self) -> None:
        while not self._closed:
            self._greeting.acquire()  # others wait in the listener's backlog
            caller = None
            try:
                caller, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(caller,), name="refit caller", daemon=True).start()
            except (OSError, RuntimeError):  # closed, or out of descriptors or threads for the moment
                self._greeting.release()
                if caller is not None:
                    caller.close()
                time.sleep(0.05)

    def _greet(self, taken: socket.socket) -> None:
        try:
            self._hear(taken)
        finally:
            self._greeting.release()

    def _hear(self, taken: socket.socket) -> None:
        try:
            control = Control(taken, self._timeout, "the caller")
        except OSError:  # left already
            taken.close()
            return
        deadline = threading.Timer(min(self._timeout, GREETING_SECONDS), control.close)
        deadline.daemon = True
        try:
            deadline.start()
            control.authenticate(self._token, calling=False)
            greeting = control.hear(name=str, domain=str)
        except (LinkError, RuntimeError):  # RuntimeError: out of threads
            control.close()
            return
        finally:
            deadline.cancel()
        name, caller = greeting["name"], _Caller(control, greeting["domain"])
        control.other = name
        with self._called:
            replaced = caller if self._closed else self._callers.get(name)
            if not self._closed:
                self._callers[name] = caller
                self._called.notify_all()
        if replaced is not None:
            replaced.control.close()


class _Caller(NamedTuple):
    control: Control
    domain: str


def connect(
    address: tuple[str, int], token: str, name: str, timeout: float, device: torch.device = HOST
) -> ReceivingEnd:
    """The link from the source whose post is at `address`; waits until it accepts `name`. timeout: seconds of a wait.
    device: where the weights go.

    Raises LinkError where the source is not there, has another token, or does not accept in time.
    """
    source = f"the source at {address[0]}:{address[1]}"
    try:
        control = Control(socket.create_connection(address, timeout), timeout, source)
    except OSError as error:
        raise LinkError(f"cannot reach {source} ({error})") from None
    try:
        control.authenticate(token, calling=True)
        control.say(name=name, domain=shared_memory.domain())
        while True:
            if (end := _taken(control, device)) is not None:
                return end
    except Exception as error:
        control.refuse(error)
        raise


def _taken(control: Control, device: torch.device) -> ReceivingEnd | None:
    """What the source offers next; None where it will offer something else."""
    offered = control.hear(transport=str, capacity=int)
    transport, capacity = offered["transport"], offered["capacity"]
    if capacity < 1:
        raise LinkError(f"{control.other} offers {offered}, which is no link")
    match transport:
        case "shared_memory":
            return shared_memory.take(control, capacity)
        case "cuda_ipc":
            return cuda_ipc.take(control, capacity, device)
        case "nixl":
            return nixl.take(control, capacity, device)
        case "collective":
            return collective.take(control, capacity)
    raise LinkError(f"{control.other} offers {offered}, which is no link that is known here")
