"""A link between processes of any hosts: torch.distributed point-to-point in a process group of just the two ends.

The group is built directly, because both processes already have the default group of Megatron or vLLM. gloo, through
memory of the hosts; from GPU to GPU is `nixl`'s. gloo authenticates nobody: who reaches `host` can disturb a group, so
`host` is loopback or an address of a network that only the run's machines share.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.ends import Receiver, Sender
from nemo_fp8rl.refit.transport.link import BUFFERS, LinkError, ReceivingEnd, SendingEnd

SOURCE, SINK = 0, 1
"""Ranks in the group."""
_Gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options, send and recv


def listen(host: str, timeout: float) -> dist.TCPStore:
    """Where the groups of a source meet. Given no socket, TCPStore would listen on every interface."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
        use_libuv=False,
    )


def offer(control: Control, capacity: int, store: dist.Store, port: int) -> SendingEnd:
    """The source's end. store: from `listen`, on this port. Raises LinkError where the group cannot be made."""
    prefix = secrets.token_hex(16)
    control.say(port=port, prefix=prefix)
    return _CollectiveSender(control, _buffers(capacity), _group(control, lambda: store, prefix, SOURCE))


def take(control: Control, capacity: int) -> ReceivingEnd:
    """The sink's end. Raises LinkError where the group cannot be made."""
    greeting = control.hear(port=int, prefix=str)

    def store() -> dist.Store:
        limit = timedelta(seconds=control.timeout)
        return dist.TCPStore(
            control.other_host, greeting["port"], timeout=limit, wait_for_workers=False, use_libuv=False
        )

    return _CollectiveReceiver(control, _buffers(capacity), _group(control, store, greeting["prefix"], SINK))


def _buffers(capacity: int) -> list[Tensor]:
    return [torch.empty(capacity, dtype=torch.uint8) for _ in range(BUFFERS)]


def _group(control: Control, store: Callable[[], dist.Store], prefix: str, rank: int) -> Any:
    """Made in a thread of its own: gloo would wait the whole timeout for a peer that has died meanwhile."""

    def build() -> Any:
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=control.local_host)]
        options._threads = 1
        options._timeout = timedelta(seconds=control.timeout)
        return _Gloo(dist.PrefixStore(prefix, store()), rank, 2, options)

    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(build())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="refit group", daemon=True).start()
    heard = False
    while not wait([made], 0.05).done:
        heard = heard or (control.readable() and bool(control.hear(joined=bool)))
    if (error := made.exception()) is not None:
        raise LinkError(f"no process group with {control.other} within {control.timeout:g} s ({error})") from None
    control.say(joined=True)
    if not heard:
        control.hear(joined=bool)
    return made.result()


class _CollectiveSender(Sender):
    def __init__(self, control: Control, buffers: Sequence[Tensor], group: Any) -> None:
        super().__init__(control, buffers)
        self._group = group
        self._works: dict[int, dist.Work] = {}

    def _reuse(self, slot: int) -> None:
        if slot in self._works:  # as good as done: the receiver has released it
            _finish(self._works.pop(slot), self._control)

    def _give(self, slot: int, payload: Tensor) -> None:
        if len(payload):
            try:
                self._works[slot] = self._group.send([payload], SINK, slot)
            except RuntimeError as error:
                raise LinkError(f"{self._control.other} is gone ({error})") from None


class _CollectiveReceiver(Receiver):
    def __init__(self, control: Control, buffers: Sequence[Tensor], group: Any) -> None:
        self._group = group
        super().__init__(control, buffers)  # starts to read

    def _take(self, slot: int, payload: Tensor) -> None:
        if len(payload):
            try:
                work = self._group.recv([payload], SOURCE, slot)
            except RuntimeError as error:
                raise LinkError(f"{self._control.other} is gone ({error})") from None
            _finish(work, self._control)


def _finish(work: dist.Work, control: Control) -> None:
    try:
        work.wait(timedelta(seconds=control.timeout))
    except RuntimeError as error:
        raise LinkError(
            f"no payload moved with {control.other} in {control.timeout:g} s, or it is gone ({error})"
        ) from None
