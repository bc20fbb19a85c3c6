"""Constants and steps that the tests of links share."""

import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_fp8rl.refit.transport import shared_memory
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.handshake import Listener
from nemo_fp8rl.refit.transport.link import LinkError
from tests.refit.memory_engine import TRANSPORTS

CAPACITY = 100_003
TOKEN = "token of the run"
PROCESS_TRANSPORTS = TRANSPORTS[1:]
LONG, SHORT = 20.0, 0.5
"""Timeouts that no passing test reaches, and one that a test waits for."""
AT_ONCE = 3.0
"""Seconds, on a loaded machine."""


def in_thread(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call in a new thread."""
    threads = ThreadPoolExecutor(1)
    result = threads.submit(call, *args)
    threads.shutdown(wait=False)
    return result


def fill_and_send(sender: Any, header: bytes, payload: bytes) -> None:
    buffer = sender.acquire_buffer()
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (CAPACITY,)
    if payload:
        buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    sender.send(header, len(payload))


@contextmanager
def raises_link_error(match: str = ".", within: float = AT_ONCE) -> Iterator[None]:
    start = time.monotonic()
    with pytest.raises(LinkError, match=match):
        yield
    assert time.monotonic() - start < within


def wait_until(condition: Callable[[], object], within: float = AT_ONCE) -> None:
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def frame(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


@contextmanager
def control_pair(timeout: float) -> Iterator[tuple[Control, Control]]:
    """Return the source's and the sink's side of a control connection that is not authenticated."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        pair = Control(listener.accept()[0], timeout, "the sink"), Control(caller, timeout, "the source")
    yield pair
    for control in pair:
        control.close()


@contextmanager
def authenticated_caller(listener: Listener, **greeting: Any) -> Iterator[Control]:
    """Connect as a sink that knows the token, with these greeting fields."""
    control = Control(socket.create_connection(listener.address), LONG, "the source")
    control.authenticate(TOKEN, is_caller=True)
    control.send_fields(**{"domain": shared_memory.domain()} | greeting)
    yield control
    control.close()


def link_files() -> list[str]:
    """Return the files of links that this process maps, by the kernel's names."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if shared_memory.PREFIX in line]
