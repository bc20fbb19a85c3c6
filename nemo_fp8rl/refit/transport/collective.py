"""A link between processes of any hosts: torch.distributed point-to-point in a process group of just the two ends.

The group is built directly, because both processes already have the default group of Megatron or vLLM. It uses gloo,
through the hosts' memory; `nixl` moves data from GPU to GPU. gloo authenticates nobody: any process that reaches `host`
can disturb a group, so `host` is loopback or an address of a network that only the run's machines share.
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
CONNECT_SECONDS = 0.5
"""Timeout of one attempt to connect to the source's store; also the longest time that it takes to give up."""
_Gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options, send and recv


def listen(host: str, timeout: float) -> dist.TCPStore:
    """Open the store through which the groups of a source are built, on this host's address alone.

    Without a socket of ours, TCPStore would listen on every interface.
    """
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
    """Make the source's end.

    store:  from `listen`, on this port
    Raises: LinkError if the group cannot be built
    """
    buffers, prefix = [_allocate_buffers(capacity)], secrets.token_hex(16)
    control.send_fields(port=port, prefix=prefix)
    return _CollectiveSender(control, *_build_group(control, lambda _: store, prefix, SOURCE, buffers))


def take(control: Control, capacity: int) -> ReceivingEnd:
    """Make the sink's end. Raises LinkError if the group cannot be built."""
    fields = control.receive_fields(port=int, prefix=str)
    buffers = [_allocate_buffers(capacity)]

    def connect_store(cancel: threading.Event) -> dist.Store:
        deadline, limit = time.monotonic() + control.timeout, timedelta(seconds=min(CONNECT_SECONDS, control.timeout))
        while True:
            try:
                store = dist.TCPStore(
                    control.peer_host, fields["port"], timeout=limit, wait_for_workers=False, use_libuv=False
                )
            except dist.DistNetworkError:
                if cancel.is_set() or time.monotonic() >= deadline:
                    raise
                continue
            store.set_timeout(timedelta(seconds=control.timeout))
            return store

    return _CollectiveReceiver(control, *_build_group(control, connect_store, fields["prefix"], SINK, buffers))


def _allocate_buffers(capacity: int) -> list[Tensor]:
    """Allocate a link's buckets, before either side waits for the group. Raises LinkError without the memory."""
    try:
        return [torch.empty(capacity, dtype=torch.uint8) for _ in range(BUFFERS)]
    except (RuntimeError, TypeError, OverflowError):
        raise LinkError(
            f"no memory for a link's two buckets of {capacity} bytes: set a smaller nemo_fp8rl.refit.bucket_bytes"
        ) from None


class _CancellableStore(dist.Store):
    """A store whose waits end when `cancel` is set; the two ends of a group find each other through it."""

    def __init__(self, store: dist.Store, timeout: float, cancel: threading.Event) -> None:
        super().__init__()
        self.store, self.default, self.cancel = store, timedelta(seconds=timeout), cancel

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self.default).total_seconds()
        while not self.store.check(keys):
            if self.cancel.wait(0.01) or time.monotonic() >= deadline:
                raise RuntimeError("nobody came")


def _build_group(
    control: Control,
    get_store: Callable[[threading.Event], dist.Store],
    prefix: str,
    rank: int,
    buffer_box: list[list[Tensor]],
) -> tuple[list[Tensor], Any]:
    """Build the group and return (buckets, group).

    The group is built in its own thread, because gloo would wait the whole timeout for a peer that has died. That
    thread takes the buckets out of `buffer_box`, so that the caller refers to no tensor while it waits: its process may
    end in that time (see `link_threads`).

    get_store:  returns the store; it gives up when the event is set
    prefix:     of the group's keys in the store
    rank:       SOURCE or SINK
    buffer_box: a list whose only item is the buckets
    """
    result: Future[tuple[list[Tensor], Any]] = Future()
    cancel = threading.Event()

    def build() -> tuple[list[Tensor], Any]:
        buffers, options = buffer_box.pop(), _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=control.local_host)]
        options._threads = 1
        options._timeout = timedelta(seconds=control.timeout)
        store = _CancellableStore(dist.PrefixStore(prefix, get_store(cancel)), control.timeout, cancel)
        return buffers, _Gloo(store, rank, 2, options)

    def run() -> None:
        try:
            result.set_result(build())
        except Exception as error:
            result.set_exception(LinkError(str(error)))  # without the traceback, which keeps gloo's arguments alive

    link_threads.start("refit group", run, cancel.set)
    peer_joined = False
    try:
        while not wait([result], 0.05).done:
            peer_joined = peer_joined or (control.is_readable() and bool(control.receive_fields(joined=bool)))
    finally:
        cancel.set()
    if (error := result.exception()) is not None:
        raise LinkError(
            f"no process group with {control.peer} within {timeout_text(control.timeout)} ({error})"
        ) from None
    control.send_fields(joined=True)
    if not peer_joined:
        control.receive_fields(joined=bool)
    return result.result()


class _CollectiveSender(Sender):
    def __init__(self, control: Control, buffers: Sequence[Tensor], group: Any) -> None:
        super().__init__(control, buffers)
        self._group = group
        self._works: dict[int, dist.Work] = {}

    def _reclaim(self, slot: int) -> None:
        if slot in self._works:  # it is nearly finished: the receiver has released the message
            _wait_for(self._works.pop(slot), self._control)

    def _start_transfer(self, slot: int, payload: Tensor) -> None:
        if len(payload):
            try:
                self._works[slot] = self._group.send([payload], SINK, slot)
            except RuntimeError as error:
                raise LinkError(f"{self._control.peer} is gone ({error})") from None


class _CollectiveReceiver(Receiver):
    def __init__(self, control: Control, buffers: Sequence[Tensor], group: Any) -> None:
        self._group = group
        super().__init__(control, buffers)  # starts to read

    def _fetch(self, slot: int, payload: Tensor) -> None:
        if len(payload):
            try:
                work = self._group.recv([payload], SOURCE, slot)
            except RuntimeError as error:
                raise LinkError(f"{self._control.peer} is gone ({error})") from None
            _wait_for(work, self._control)


def _wait_for(work: dist.Work, control: Control) -> None:
    try:
        work.wait(timedelta(seconds=control.timeout))
    except RuntimeError as error:
        raise LinkError(
            f"no payload moved with {control.peer} in {timeout_text(control.timeout)}, or it is gone ({error})"
        ) from None
