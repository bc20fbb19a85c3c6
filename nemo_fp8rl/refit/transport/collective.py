"""A link between processes of any hosts: torch.distributed point-to-point in a process group of just the two ends.

The group is built directly, because both processes already have the default group of Megatron or vLLM. gloo, through
memory of the hosts; from GPU to GPU is `nixl`'s. gloo authenticates nobody: who reaches `host` can disturb a group, so
`host` is loopback or an address of a network that only the run's machines share.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_fp8rl.refit.transport import link_threads
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.double_buffer import Receiver, Sender
from nemo_fp8rl.refit.transport.link import BUFFERS, LinkError, ReceivingEnd, SendingEnd, timeout_text

SOURCE, SINK = 0, 1
"""Ranks in the group."""
PATIENCE = 0.5
"""Seconds to wait for the source's store to answer before it is called again: as long as giving up may take."""
_Gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options, send and recv


def listen(host: str, timeout: float) -> dist.TCPStore:
    """The store where the groups of a source meet. Given no socket, TCPStore would listen on every interface."""
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
    held, prefix = [_buffers(capacity)], secrets.token_hex(16)
    control.say(port=port, prefix=prefix)
    return _CollectiveSender(control, *_group(control, lambda _: store, prefix, SOURCE, held))


def take(control: Control, capacity: int) -> ReceivingEnd:
    """The sink's end. Raises LinkError where the group cannot be made."""
    greeting = control.hear(port=int, prefix=str)
    held = [_buffers(capacity)]

    def store(given_up: threading.Event) -> dist.Store:
        end, limit = time.monotonic() + control.timeout, timedelta(seconds=min(PATIENCE, control.timeout))
        while True:
            try:
                found = dist.TCPStore(
                    control.other_host, greeting["port"], timeout=limit, wait_for_workers=False, use_libuv=False
                )
            except dist.DistNetworkError:
                if given_up.is_set() or time.monotonic() >= end:
                    raise
                continue
            found.set_timeout(timedelta(seconds=control.timeout))
            return found

    return _CollectiveReceiver(control, *_group(control, store, greeting["prefix"], SINK, held))


def _buffers(capacity: int) -> list[Tensor]:
    """A link's buckets, made before either side waits for the group. Raises LinkError without the memory."""
    try:
        return [torch.empty(capacity, dtype=torch.uint8) for _ in range(BUFFERS)]
    except (RuntimeError, TypeError, OverflowError):
        raise LinkError(
            f"no memory for a link's two buckets of {capacity} bytes: set a smaller nemo_fp8rl.refit.bucket_bytes"
        ) from None


class _Meeting(dist.Store):
    """Where the two ends of a group find each other: a store whose waits end when one of them has given up."""

    def __init__(self, store: dist.Store, timeout: float, given_up: threading.Event) -> None:
        super().__init__()
        self.store, self.default, self.given_up = store, timedelta(seconds=timeout), given_up

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self.default).total_seconds()
        while not self.store.check(keys):
            if self.given_up.wait(0.01) or time.monotonic() >= end:
                raise RuntimeError("nobody came")


def _group(
    control: Control,
    store: Callable[[threading.Event], dist.Store],
    prefix: str,
    rank: int,
    held: list[list[Tensor]],
) -> tuple[list[Tensor], Any]:
    """(the buckets that are in `held`, the group). Made in a thread of its own: gloo would wait the whole timeout for a
    peer that has died meanwhile. That thread takes the buckets out of `held`: who calls holds nothing of torch's while
    it waits, for its process may end then (see `threads`).
    """
    made: Future[tuple[list[Tensor], Any]] = Future()
    given_up = threading.Event()

    def build() -> tuple[list[Tensor], Any]:
        buffers, options = held.pop(), _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=control.local_host)]
        options._threads = 1
        options._timeout = timedelta(seconds=control.timeout)
        meeting = _Meeting(dist.PrefixStore(prefix, store(given_up)), control.timeout, given_up)
        return buffers, _Gloo(meeting, rank, 2, options)

    def run() -> None:
        try:
            made.set_result(build())
        except Exception as error:
            made.set_exception(LinkError(str(error)))  # without the traceback, which keeps what gloo was given

    link_threads.start("refit group", run, given_up.set)
    heard = False
    try:
        while not wait([made], 0.05).done:
            heard = heard or (control.readable() and bool(control.hear(joined=bool)))
    finally:
        given_up.set()
    if (error := made.exception()) is not None:
        raise LinkError(
            f"no process group with {control.other} within {timeout_text(control.timeout)} ({error})"
        ) from None
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
            f"no payload moved with {control.other} in {timeout_text(control.timeout)}, or it is gone ({error})"
        ) from None
