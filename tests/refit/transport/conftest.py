"""Fixtures that make links."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport.handshake import Listener, connect
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.remote_end import LocalEnd, RemoteEnd
from tests.refit.transport.links import CAPACITY, LONG, TOKEN, in_thread, raises_link_error


@pytest.fixture
def cleanup() -> Iterator[list[Any]]:
    """A list of things that are closed, or killed, after the test."""
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        thing.kill() if isinstance(thing, RemoteEnd) else thing.close()


@pytest.fixture
def make_link(cleanup: list[Any]) -> Callable[..., tuple[Any, Any]]:
    """make_link(transport, timeout) -> a sending end, and a receiving end in another process if there are two."""

    def make(transport: str, timeout: float = LONG) -> tuple[Any, Any]:
        if transport == "in_process":
            sender, receiver = in_process_link(CAPACITY, timeout)
            cleanup.append(sender)
            return sender, LocalEnd(receiver)
        listener, remote = Listener(transport, "127.0.0.1", TOKEN, LONG), RemoteEnd()  # type: ignore[arg-type]
        cleanup.extend([listener, remote])
        remote.start("connect", listener.address, TOKEN, "sink", LONG)
        sender: Any = listener.accept("sink", CAPACITY)
        cleanup.append(sender)
        remote.result()
        sender._control.timeout = timeout  # after the link is made, which may take long on a loaded machine
        remote.set_timeout(timeout)
        return sender, remote

    return make


@pytest.fixture
def make_local_link(cleanup: list[Any]) -> Callable[..., tuple[Any, Any]]:
    """make_local_link(transport, timeout) -> both ends in this process, over the real connection."""

    def make(transport: Any, timeout: float = LONG, capacity: int = CAPACITY) -> tuple[Any, Any]:
        if transport == "in_process":
            return in_process_link(capacity, timeout)
        listener = Listener(transport, "127.0.0.1", TOKEN, LONG)
        cleanup.append(listener)
        connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
        link_ends = (listener.accept("sink", capacity), connecting.result(LONG))
        for end in link_ends:
            end._control.timeout = timeout  # type: ignore[attr-defined]
            cleanup.append(end)
        return link_ends

    return make


@pytest.fixture
def check_refused(cleanup: list[Any]) -> Callable[[Any, str, str], None]:
    """check_refused(transport, source, sink): no link is made, and the errors of both sides match."""

    def check(transport: Any, source: str, sink: str) -> None:
        listener = Listener(transport, "127.0.0.1", TOKEN, LONG)
        cleanup.append(listener)
        connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
        with pytest.raises(RefitError, match=source):
            listener.accept("sink", CAPACITY)
        with raises_link_error(sink):
            connecting.result(LONG)

    return check
