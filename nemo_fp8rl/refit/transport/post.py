"""Where links begin: a source rank keeps a post, sink ranks dial it by name, and both prove that they know the token.

sink                                source
connect                             accept, one thread a caller
        <- both prove the token ->
{name}                           -> waits under this name, the last caller of a name counts
                                    accept(name, capacity)
                                 <- {transport, capacity}
        <- what the transport needs ->
"""

import socket
import threading
import time
from contextlib import suppress

import torch

from nemo_fp8rl.refit.transport import collective, cuda_ipc, nixl, shared_memory
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.link import HOST, Between, LinkError, ReceivingEnd, SendingEnd


class Post:
    """Listens on `host` alone, at `address`. timeout: seconds of every wait here and on the links made here.
    device: of the weights.

    A caller without the token, or one that says nothing, is dropped and keeps nobody else waiting.
    """

    def __init__(self, transport: Between, host: str, token: str, timeout: float, device: torch.device = HOST) -> None:
        if not token:
            raise ValueError("the run's token is empty: anyone could send weights")
        self._transport, self._token, self._timeout, self._device = transport, token, timeout, device
        self._store = collective.listen(host, timeout) if transport == "collective" else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._callers: dict[str, Control] = {}
        self._called = threading.Condition()
        self._closed = False
        threading.Thread(target=self._listen, name="refit post", daemon=True).start()

    def accept(self, name: str, capacity: int) -> SendingEnd:
        """The link to the sink of this name, with two buffers of `capacity` bytes; waits for its call.

        Raises LinkError where it does not call or leaves, RefitError where there is no memory for the buffers.
        """
        if capacity < 1:
            raise ValueError(f"a bucket of {capacity} bytes")
        control = self._caller(name)
        try:
            control.say(transport=self._transport, capacity=capacity)
            match self._transport:
                case "shared_memory":
                    return shared_memory.offer(control, capacity)
                case "cuda_ipc":
                    return cuda_ipc.offer(control, capacity, self._device)
                case "nixl":
                    return nixl.offer(control, capacity, self._device)
                case "collective":
                    assert self._store is not None
                    return collective.offer(control, capacity, self._store, self._store.port)
        except Exception as error:
            control.refuse(error)
            raise

    def close(self) -> None:
        """No calls from now on. Links that stand stay."""
        with self._called:
            self._closed = True
            self._called.notify_all()
            callers = list(self._callers.values())
            self._callers.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._listener.close()
        for control in callers:
            control.close()

    def _caller(self, name: str) -> Control:
        deadline = time.monotonic() + self._timeout
        with self._called:
            while True:
                in_time = self._called.wait_for(
                    lambda: self._closed or name in self._callers, deadline - time.monotonic()
                )
                if self._closed:
                    raise LinkError("the post is closed")
                if not in_time:
                    raise LinkError(f"{name} did not call within {self._timeout:g} s")
                control = self._callers.pop(name)
                with suppress(LinkError):
                    if not control.readable():  # else its process died while it waited, and may call again
                        return control

    def _listen(self) -> None:
        while not self._closed:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors for the moment
                time.sleep(0.05)
                continue
            threading.Thread(target=self._greet, args=(caller,), name="refit caller", daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        try:
            control = Control(caller, self._timeout, "the caller")
        except OSError:  # left already
            caller.close()
            return
        deadline = threading.Timer(self._timeout, control.close)  # for one that says a byte now and then
        deadline.daemon = True
        deadline.start()
        try:
            control.authenticate(self._token, calling=False)
            name = control.hear(name=str)["name"]
        except LinkError:
            control.close()
            return
        finally:
            deadline.cancel()
        control.other = name
        with self._called:
            replaced = control if self._closed else self._callers.get(name)
            if not self._closed:
                self._callers[name] = control
                self._called.notify_all()
        if replaced is not None:
            replaced.close()


def dial(address: tuple[str, int], token: str, name: str, timeout: float, device: torch.device = HOST) -> ReceivingEnd:
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
        control.say(name=name)
        offered = control.hear(transport=str, capacity=int)
        transport, capacity = offered["transport"], offered["capacity"]
        if capacity < 1:
            raise LinkError(f"{source} offers {offered}, which is no link")
        match transport:
            case "shared_memory":
                return shared_memory.take(control, capacity)
            case "cuda_ipc":
                return cuda_ipc.take(control, capacity, device)
            case "nixl":
                return nixl.take(control, capacity, device)
            case "collective":
                return collective.take(control, capacity)
        raise LinkError(f"{source} offers {offered}, which is no link that is known here")
    except Exception as error:
        control.refuse(error)
        raise
