"""A link between processes of any hosts by NIXL: the sink reads a bucket out of the source's memory into its own.

On a network with RDMA (InfiniBand, RoCE) the data go from GPU to GPU where weights are on GPUs; elsewhere UCX, which
NIXL uses, copies through shared memory or TCP. UCX authenticates nobody, and any process that reaches it may read and
write this process's memory: use a network of the run's machines alone, as RDMA devices need anyway. On loopback UCX
listens on loopback alone; otherwise UCX_NET_DEVICES and UCX_TLS set what it uses.
"""

import importlib
import ipaddress
import logging
import secrets
import threading
import time
import weakref
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport import cuda_memory, link_threads
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.double_buffer import Receiver, Sender
from nemo_fp8rl.refit.transport.link import BUFFERS, GRACE, LinkError, ReceivingEnd, SendingEnd, timeout_text

BUSY_POLL_SECONDS, IDLE_POLL_SECONDS, BUSY_SECONDS = 0.0005, 0.02, 30.0
"""Seconds between polls for requests of other processes: the first while transfers go on, the second from BUSY_SECONDS
after the last payload on."""
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
INSTALL = "pip install 'nemo-fp8rl[nixl]'"


def offer(control: Control, capacity: int, device: torch.device) -> SendingEnd:
    """Make the source's end, with buckets on its device.

    Raises: RefitError if NIXL is missing or cannot have the buckets, LinkError if the sink cannot reach them
    """
    try:
        _make_current(device)
        buckets = _RegisteredBuckets(_get_agent("source", control.local_host), capacity, device)
    except Exception as error:
        raise RefitError(
            f"NIXL has no two buckets of {capacity / 2**20:.1f} MiB on {device} ({_describe(error)}): set "
            "nemo_fp8rl.refit.transport=auto, or a smaller nemo_fp8rl.refit.bucket_bytes where memory is short"
        ) from None
    try:
        metadata = b64encode(buckets.metadata).decode()
        control.send_fields(metadata=metadata, addresses=buckets.addresses, **_location(device))
        control.receive_fields(joined=bool)
    except BaseException:
        buckets.deregister()
        raise
    return _NixlSender(control, buckets)


def take(control: Control, capacity: int, device: torch.device) -> ReceivingEnd:
    """Make the sink's end, with buckets on its device.

    Raises: LinkError if NIXL is missing or cannot reach the source
    """
    fields = control.receive_fields(metadata=str, addresses=list, memory=str, device=int)
    addresses = fields["addresses"]
    if fields["memory"] not in MEMORY.values() or [type(a) for a in addresses] != [int] * BUFFERS:
        raise LinkError(f"{control.peer} offers {addresses} in {fields['memory']}, which are not buckets")
    try:
        _make_current(device)
        buckets = _RegisteredBuckets(_get_agent("sink", control.local_host), capacity, device)
        try:
            remote = buckets.agent.add_remote(b64decode(fields["metadata"], validate=True))
        except BaseException:
            buckets.deregister()
            raise
    except Exception as error:
        raise LinkError(
            f"NIXL makes no link with {control.peer} ({_describe(error)}): set nemo_fp8rl.refit.transport=auto"
        ) from None
    end = _NixlReceiver(control, buckets, remote, [(a, fields["memory"], fields["device"]) for a in addresses])
    control.send_fields(joined=True)
    return end


class _Agent:
    """NIXL's agent, one per role in a process. NIXL serves one thread at a time: calls go through `use_api`.

    The agent's own thread would look after transfers without a pause, so it is off, and a thread of ours must poll.
    """

    def __init__(self, role: str, loopback: bool) -> None:
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise RuntimeError(f"{INSTALL}: {error}") from None
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._lock = threading.RLock()
        with self._lock:
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._nixl = api.nixl_agent(f"nemo_fp8rl-{role}-{secrets.token_hex(16)}", config)
            self._nixl.create_backend("UCX", {"engine_config": "NET_DEVICES=lo"} if loopback else {})
        self._remotes: Counter[str] = Counter()
        self._deadlines: dict[_RegisteredBuckets, float] = {}  # the time until which each stays registered
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._busy_until = 0.0
        self.released_buckets: SimpleQueue[_RegisteredBuckets] = SimpleQueue()
        """Buckets of links that have ended. Finalizers, which must take no lock, put them there, too."""

    @contextmanager
    def use_api(self) -> Iterator[Any]:
        with self._lock:
            yield self._nixl

    def add_remote(self, metadata: bytes) -> str:
        """Make the agent of another process known and return its name; each call needs a `remove_remote`."""
        with self.use_api() as nixl:
            name = nixl.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
            self._remotes[name] += 1
            return name

    def remove_remote(self, name: str) -> None:
        with self.use_api() as nixl:
            self._remotes[name] -= 1
            if not self._remotes[name]:  # the agent's knowledge of memory that is gone goes with it
                nixl.remove_remote_agent(name)

    def serve(self, buckets: "_RegisteredBuckets") -> None:
        """Let a sink read the buckets, until GRACE seconds after they are among `released_buckets`.

        For TCP this process must poll all the time; for RDMA only at the beginning.
        """
        with self._lock:
            self._deadlines[buckets] = float("inf")
            if self._thread is None:
                device = buckets.tensors[0].device
                self._thread = link_threads.start("refit nixl", lambda: self._serve(device), self._stop.set)

    def poll_faster(self) -> None:
        """Poll more often for a while: a sink is about to read."""
        self._busy_until = time.monotonic() + BUSY_SECONDS

    def _serve(self, device: torch.device) -> None:
        _make_current(device)
        while self._serve_once() and not self._stop.is_set():
            time.sleep(BUSY_POLL_SECONDS if time.monotonic() < self._busy_until else IDLE_POLL_SECONDS)

    def _serve_once(self) -> bool:
        """Serve requests and deregister old buckets. Return False if there are no buckets to serve any more."""
        with self.use_api() as nixl, _log_errors("serving the reads of sinks"):
            nixl.get_new_notifs()  # moves all data that can be moved now
        with self._lock:
            while not self.released_buckets.empty():
                self._deadlines[self.released_buckets.get()] = time.monotonic() + GRACE
            for buckets in [b for b, deadline in self._deadlines.items() if deadline < time.monotonic()]:
                del self._deadlines[buckets]
                buckets.deregister()
            if not self._deadlines:
                self._thread = None
            return bool(self._deadlines)


_agents: dict[tuple[str, bool], _Agent] = {}
_agents_lock = threading.Lock()


def _get_agent(role: Literal["source", "sink"], host: str) -> _Agent:
    """Return this process's agent for a role."""
    key = role, ipaddress.ip_address(host).is_loopback
    with _agents_lock:
        if key not in _agents:
            _agents[key] = _Agent(*key)
        return _agents[key]


class _RegisteredBuckets:
    """The two buckets of one end, registered with an agent until `deregister`."""

    def __init__(self, agent: _Agent, capacity: int, device: torch.device) -> None:
        self.agent = agent
        self.tensors = _allocate_buckets(capacity, device)
        with agent.use_api() as nixl:
            self._registration = nixl.register_memory(list(self.tensors))
            self.metadata: bytes = nixl.get_partial_agent_metadata(self._registration, True, ["UCX"])

    @property
    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]

    def deregister(self) -> None:
        with self.agent.use_api() as nixl, _log_errors("deregistering a link's buckets"):
            nixl.deregister_memory(self._registration)


def _allocate_buckets(capacity: int, device: torch.device) -> Sequence[Tensor]:
    if device.type == cuda_memory.DEVICE_TYPE:
        return cuda_memory.CudaMemory(device).allocate(capacity, cuda_memory.FREE_AT_ONCE)
    return [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]


class _NixlSender(Sender):
    def __init__(self, control: Control, buckets: _RegisteredBuckets) -> None:
        super().__init__(control, buckets.tensors)
        self._agent = buckets.agent
        buckets.agent.serve(buckets)
        self._release_buckets = weakref.finalize(self, buckets.agent.released_buckets.put, buckets)
        self._release_buckets.atexit = False

    def close(self) -> None:
        super().close()
        self._release_buckets()

    def _start_transfer(self, slot: int, payload: Tensor) -> None:
        self._agent.poll_faster()


class _NixlReceiver(Receiver):
    """remote: the name of the source's agent. remote_buckets: address, kind of memory and device number of each."""

    def __init__(
        self,
        control: Control,
        buckets: _RegisteredBuckets,
        remote: str,
        remote_buckets: list[tuple[int, str, int]],
    ) -> None:
        self._registered, self._remote, self._remote_buckets = buckets, remote, remote_buckets
        self._transfer: Any = None  # the one that writes to the buckets, or may do so
        super().__init__(control, buckets.tensors)  # starts to read

    def _fetch(self, slot: int, payload: Tensor) -> None:
        if not len(payload):
            return
        deadline = time.monotonic() + self._control.timeout
        try:
            self._begin_transfer(slot, payload)
            while self._is_in_progress():
                if self._control.is_closed:
                    raise LinkError(f"the link with {self._control.peer} is closed")
                if time.monotonic() > deadline:
                    raise LinkError(
                        f"no payload came from {self._control.peer} in {timeout_text(self._control.timeout)}"
                    )
                time.sleep(BUSY_POLL_SECONDS)
        except LinkError:
            raise
        except Exception as error:  # NIXL's exceptions have no common class
            raise LinkError(f"{self._control.peer} is gone ({_describe(error)})") from None

    def _begin_transfer(self, slot: int, payload: Tensor) -> None:
        address, memory, device = self._remote_buckets[slot]
        local = _location(payload.device)
        with self._registered.agent.use_api() as nixl:
            target = nixl.get_xfer_descs([(payload.data_ptr(), len(payload), local["device"])], local["memory"])
            source = nixl.get_xfer_descs([(address, len(payload), device)], memory)
            self._transfer = nixl.initialize_xfer("READ", target, source, self._remote)
            try:
                nixl.transfer(self._transfer)
            except Exception:
                self._release_transfer(nixl)
                raise

    def _is_in_progress(self) -> bool:
        """Return True while the transfer goes on; release it when it has ended, well or with NIXL's error."""
        with self._registered.agent.use_api() as nixl:
            try:
                state = nixl.check_xfer_state(self._transfer)
            except Exception:
                self._release_transfer(nixl)
                raise
            if state != "PROC":
                self._release_transfer(nixl)
            if state not in ("PROC", "DONE"):
                raise LinkError(f"{self._control.peer} is gone: NIXL says {state}")
            return bool(state == "PROC")

    def _release_transfer(self, nixl: Any) -> None:
        transfer, self._transfer = self._transfer, None
        with _log_errors("releasing a transfer"):
            nixl.release_xfer_handle(transfer)

    def _read(self) -> None:
        try:
            _make_current(self._registered.tensors[0].device)
            super()._read()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        """Wait for a transfer for which no other code waits. The memory of one that does not end is kept."""
        deadline = time.monotonic() + GRACE
        with suppress(Exception):  # an exception of NIXL also means that the transfer has ended
            while self._transfer is not None and self._is_in_progress():
                if time.monotonic() > deadline:
                    _stuck_receivers.append(self)
                    return
                time.sleep(BUSY_POLL_SECONDS)
        self._registered.deregister()
        with _log_errors("removing a source's agent"):
            self._registered.agent.remove_remote(self._remote)


_stuck_receivers: list[_NixlReceiver] = []
"""Kept for the life of the process, so that a transfer that may go on writes to no memory with another use."""


@contextmanager
def _log_errors(what: str) -> Iterator[None]:
    """Log NIXL's errors, each once, where no caller waits for them. NIXL's exceptions have no common class."""
    try:
        yield
    except Exception as error:
        if (message := f"NIXL, {what}: {_describe(error)}") not in _logged_messages:
            _logged_messages.add(message)
            logging.getLogger(__name__).warning(message)


_logged_messages: set[str] = set()


def _make_current(device: torch.device) -> None:
    """Give this thread the device's CUDA context, in which NIXL works; without one UCX does not use NVLink."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)


def _location(device: torch.device) -> dict[str, Any]:
    return {"memory": MEMORY[device.type], "device": device.index or 0}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
