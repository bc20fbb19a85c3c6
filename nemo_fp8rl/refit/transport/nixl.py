"""A link between processes of any hosts by NIXL: the sink reads a bucket out of the source's memory into its own.

On a network that can (InfiniBand, RoCE) that is RDMA, from GPU to GPU where weights are on GPUs; elsewhere UCX, which
NIXL uses, copies through shared memory or TCP. UCX authenticates nobody, and who reaches it may read and write the
process' memory: a network of the run's machines alone, as for its RDMA devices anyway. On loopback it listens on that
alone; otherwise UCX_NET_DEVICES and UCX_TLS say what it uses.
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

POLL, IDLE, BUSY = 0.0005, 0.02, 30.0
"""Seconds: between looks at what others ask of this process, and while they ask for nothing; the latter begins so long
after the last payload was given.
"""
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
INSTALL = "pip install 'nemo-fp8rl[nixl]'"


def offer(control: Control, capacity: int, device: torch.device) -> SendingEnd:
    """The source's end; the buckets are on its device. Raises RefitError where NIXL is missing or cannot have them,
    LinkError where the sink cannot reach them.
    """
    try:
        _make_current(device)
        held = _Held(_agent("source", control.local_host), capacity, device)
    except Exception as error:
        raise RefitError(
            f"NIXL has no two buckets of {capacity / 2**20:.1f} MiB on {device} ({_message(error)}): set "
            "nemo_fp8rl.refit.transport=auto, or a smaller nemo_fp8rl.refit.bucket_bytes where memory is short"
        ) from None
    try:
        control.say(metadata=b64encode(held.metadata).decode(), addresses=held.addresses, **_place(device))
        control.hear(joined=bool)
    except BaseException:
        held.free()
        raise
    return _NixlSender(control, held)


def take(control: Control, capacity: int, device: torch.device) -> ReceivingEnd:
    """The sink's end, with buckets on its device. Raises LinkError where NIXL is missing or cannot reach the source."""
    greeting = control.hear(metadata=str, addresses=list, memory=str, device=int)
    addresses = greeting["addresses"]
    if greeting["memory"] not in MEMORY.values() or [type(a) for a in addresses] != [int] * BUFFERS:
        raise LinkError(f"{control.other} offers {addresses} in {greeting['memory']}, which are no buckets")
    try:
        _make_current(device)
        held = _Held(_agent("sink", control.local_host), capacity, device)
        try:
            remote = held.agent.add(b64decode(greeting["metadata"], validate=True))
        except BaseException:
            held.free()
            raise
    except Exception as error:
        raise LinkError(
            f"NIXL makes no link with {control.other} ({_message(error)}): set nemo_fp8rl.refit.transport=auto"
        ) from None
    end = _NixlReceiver(control, held, remote, [(a, greeting["memory"], greeting["device"]) for a in addresses])
    control.say(joined=True)
    return end


class _Agent:
    """NIXL's agent, of which a process has one for each role. Calls go through `calls`: it serves one thread at a time.

    Its own thread, which would look after transfers without a rest, is off; so somebody must call it for them.
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
        self._serving: dict[_Held, float] = {}  # the time until which each is kept
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._busy_until = 0.0
        self.left: SimpleQueue[_Held] = SimpleQueue()
        """Buckets of links that have ended, put there by finalizers, too, which must take no lock."""

    @contextmanager
    def calls(self) -> Iterator[Any]:
        with self._lock:
            yield self._nixl

    def add(self, metadata: bytes) -> str:
        """The name of another process' agent that is known from now on; each call ends with a `remove`."""
        with self.calls() as nixl:
            name = nixl.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else name
            self._remotes[name] += 1
            return name

    def remove(self, name: str) -> None:
        with self.calls() as nixl:
            self._remotes[name] -= 1
            if not self._remotes[name]:  # with what it knows of memory that is gone
                nixl.remove_remote_agent(name)

    def serve(self, held: "_Held") -> None:
        """Let a sink read it, until some time after it is among `left`. TCP needs this process for that; RDMA only to
        begin with.
        """
        with self._lock:
            self._serving[held] = float("inf")
            if self._thread is None:
                device = held.buckets[0].device
                self._thread = link_threads.start("refit nixl", lambda: self._serve(device), self._stopped.set)

    def hurry(self) -> None:
        """Look more often at what sinks ask for: one is about to read."""
        self._busy_until = time.monotonic() + BUSY

    def _serve(self, device: torch.device) -> None:
        _make_current(device)
        while self._served() and not self._stopped.is_set():
            time.sleep(POLL if time.monotonic() < self._busy_until else IDLE)

    def _served(self) -> bool:
        """Whether there is anything left to serve."""
        with self.calls() as nixl, _log_errors("serving what sinks read"):
            nixl.get_new_notifs()  # which moves whatever can be moved
        with self._lock:
            while not self.left.empty():
                self._serving[self.left.get()] = time.monotonic() + GRACE
            for held in [held for held, end in self._serving.items() if end < time.monotonic()]:
                del self._serving[held]
                held.free()
            if not self._serving:
                self._thread = None
            return bool(self._serving)


_agents: dict[tuple[str, bool], _Agent] = {}
_making = threading.Lock()


def _agent(role: Literal["source", "sink"], host: str) -> _Agent:
    """This process' own agent for a role."""
    key = role, ipaddress.ip_address(host).is_loopback
    with _making:
        if key not in _agents:
            _agents[key] = _Agent(*key)
        return _agents[key]


class _Held:
    """The buckets of one end, registered with an agent until `free`."""

    def __init__(self, agent: _Agent, capacity: int, device: torch.device) -> None:
        self.agent = agent
        self.buckets = _buckets(capacity, device)
        with agent.calls() as nixl:
            self._registered = nixl.register_memory(list(self.buckets))
            self.metadata: bytes = nixl.get_partial_agent_metadata(self._registered, True, ["UCX"])

    @property
    def addresses(self) -> list[int]:
        return [bucket.data_ptr() for bucket in self.buckets]

    def free(self) -> None:
        with self.agent.calls() as nixl, _log_errors("letting go of a link's buckets"):
            nixl.deregister_memory(self._registered)


def _buckets(capacity: int, device: torch.device) -> Sequence[Tensor]:
    if device.type == cuda_memory.DEVICE_TYPE:
        return cuda_memory.CudaMemory(device).allocated(capacity, cuda_memory.AT_ONCE)
    return [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]


class _NixlSender(Sender):
    def __init__(self, control: Control, held: _Held) -> None:
        super().__init__(control, held.buckets)
        self._agent = held.agent
        held.agent.serve(held)
        self._leave = weakref.finalize(self, held.agent.left.put, held)
        self._leave.atexit = False

    def close(self) -> None:
        super().close()
        self._leave()

    def _give(self, slot: int, payload: Tensor) -> None:
        self._agent.hurry()


class _NixlReceiver(Receiver):
    """remote: the source's agent. theirs: address, kind of memory, and number of the device of its buckets."""

    def __init__(self, control: Control, held: _Held, remote: str, theirs: list[tuple[int, str, int]]) -> None:
        self._held, self._remote, self._theirs = held, remote, theirs
        self._moving: Any = None  # a transfer that writes to the buckets, or may
        super().__init__(control, held.buckets)  # starts to read

    def _take(self, slot: int, payload: Tensor) -> None:
        if not len(payload):
            return
        deadline = time.monotonic() + self._control.timeout
        try:
            self._begin(slot, payload)
            while self._in_progress():
                if self._control.closed:
                    raise LinkError(f"the link with {self._control.other} is closed")
                if time.monotonic() > deadline:
                    raise LinkError(
                        f"no payload came from {self._control.other} in {timeout_text(self._control.timeout)}"
                    )
                time.sleep(POLL)
        except LinkError:
            raise
        except Exception as error:  # NIXL's have no class in common
            raise LinkError(f"{self._control.other} is gone ({_message(error)})") from None

    def _begin(self, slot: int, payload: Tensor) -> None:
        address, memory, device = self._theirs[slot]
        own = _place(payload.device)
        with self._held.agent.calls() as nixl:
            here = nixl.get_xfer_descs([(payload.data_ptr(), len(payload), own["device"])], own["memory"])
            there = nixl.get_xfer_descs([(address, len(payload), device)], memory)
            self._moving = nixl.initialize_xfer("READ", here, there, self._remote)
            try:
                nixl.transfer(self._moving)
            except Exception:
                self._let_go(nixl)
                raise

    def _in_progress(self) -> bool:
        """Whether the transfer goes on; it is forgotten where it has ended, well or with NIXL's error."""
        with self._held.agent.calls() as nixl:
            try:
                state = nixl.check_xfer_state(self._moving)
            except Exception:
                self._let_go(nixl)
                raise
            if state != "PROC":
                self._let_go(nixl)
            if state not in ("PROC", "DONE"):
                raise LinkError(f"{self._control.other} is gone: NIXL says {state}")
            return bool(state == "PROC")

    def _let_go(self, nixl: Any) -> None:
        moving, self._moving = self._moving, None
        with _log_errors("forgetting a transfer"):
            nixl.release_xfer_handle(moving)

    def _read(self) -> None:
        try:
            _make_current(self._held.buckets[0].device)
            super()._read()
        finally:
            self._end()

    def _end(self) -> None:
        """Wait for a transfer that nobody else waits for. One that does not end keeps its memory."""
        deadline = time.monotonic() + GRACE
        with suppress(Exception):  # of NIXL: then, too, it has ended
            while self._moving is not None and self._in_progress():
                if time.monotonic() > deadline:
                    _stuck.append(self)
                    return
                time.sleep(POLL)
        self._held.free()
        with _log_errors("forgetting a source"):
            self._held.agent.remove(self._remote)


_stuck: list[_NixlReceiver] = []
"""Kept for good, so that a transfer that may go on writes to no memory of somebody else."""


@contextmanager
def _log_errors(what: str) -> Iterator[None]:
    """Log NIXL's errors, which have no class in common, once each, where nobody waits for what raised them."""
    try:
        yield
    except Exception as error:
        if (message := f"NIXL, {what}: {_message(error)}") not in _logged:
            _logged.add(message)
            logging.getLogger(__name__).warning(message)


_logged: set[str] = set()


def _make_current(device: torch.device) -> None:
    """NIXL works in the CUDA context of the thread that calls it, and UCX without one does not use NVLink."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)


def _place(device: torch.device) -> dict[str, Any]:
    return {"memory": MEMORY[device.type], "device": device.index or 0}


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
