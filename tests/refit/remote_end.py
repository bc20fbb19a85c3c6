"""An end of a link in another process, with the methods of an end in this one."""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.receiver.offered_places import OfferedPlaces
from nemo_fp8rl.refit.transport.handshake import Listener, connect
from nemo_fp8rl.refit.transport.link import LinkError
from tests.refit.transport import fake_cuda_runtime

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.refit.remote_end"])  # torch is imported once


class RemoteEnd:
    """A process with one end of a link. Every method is a call of that end; payloads come back as bytes.

    gpu: the process uses the machine's GPU, and no fake
    """

    def __init__(self, gpu: bool = False) -> None:
        self._calls, child_end = _processes.Pipe()
        self.process = _processes.Process(target=_serve, args=(child_end, gpu), daemon=True)
        self.process.start()
        child_end.close()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._call(name, *args)

    def start(self, name: str, *args: object) -> None:
        """Call without waiting; `result` waits."""
        self._calls.send((name, args))

    def result(self) -> Any:
        assert self._calls.poll(30), "the remote process does not answer"
        outcome = self._calls.recv()
        if isinstance(outcome, LinkError):
            raise outcome
        return outcome

    def kill(self) -> None:
        self.process.kill()  # SIGKILL
        self.process.join(10)

    def _call(self, name: str, *args: object) -> Any:
        self.start(name, *args)
        return self.result()


class LocalEnd:
    """A receiving end in this process that returns payloads as bytes and remembers those not yet released."""

    def __init__(self, end: Any) -> None:
        self.end, self.payloads = end, []

    def receive(self) -> tuple[bytes, bytes]:
        header, payload = self.end.receive()
        self.payloads.append(payload)
        return header, payload.cpu().numpy().tobytes()

    def oldest_payload(self) -> bytes:
        return self.payloads[0].cpu().numpy().tobytes()

    def release(self) -> None:
        self.end.release()
        del self.payloads[0]

    def close(self) -> None:
        self.end.close()


class _EndCalls(LocalEnd):
    """The calls of a `RemoteEnd`, in its process."""

    def __init__(self) -> None:
        """The end is made by a call of `accept` or `connect`."""

    def listen(self, transport: Any, token: str, timeout: float) -> tuple[str, int]:
        self.listener = Listener(transport, "127.0.0.1", token, timeout)
        return self.listener.address

    def accept(self, name: str, capacity: int) -> None:
        self.end = self.listener.accept(name, capacity)

    def connect(self, *args: Any) -> None:
        super().__init__(connect(*args))

    def open_places(self, version: int, nbytes: int, device: str = "cpu") -> None:
        """Of one tensor of zeros, which stays."""
        if not hasattr(self, "tensor"):
            self.offered, self.tensor = OfferedPlaces(), torch.zeros(nbytes, dtype=torch.uint8, device=device)
        part = TensorPart.of("weight", torch.uint8, (nbytes,))
        self.offered.open([self.end], version, [self.tensor], lambda: {part.name: (part, Content(self.tensor))})

    def use_growing_segments(self) -> None:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")

    def read_tensor(self) -> bytes:
        return self.tensor.cpu().numpy().tobytes()

    def set_timeout(self, timeout: float) -> None:
        self.end._control.timeout = timeout

    def fill_and_send(self, header: bytes, payload: bytes) -> None:
        self.end.acquire_buffer()[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
            : len(payload)
        ]
        self.end.send(header, len(payload))


def _serve(calls: Connection, gpu: bool) -> None:
    if not gpu:
        fake_cuda_runtime.install()
    calls_of_end = _EndCalls()
    while True:
        try:
            name, args = calls.recv()
        except EOFError:
            return
        if name == "leave":
            calls.send(None)
            return
        try:
            outcome = getattr(calls_of_end, name)(*args)
        except LinkError as error:
            outcome = error
        calls.send(outcome)
