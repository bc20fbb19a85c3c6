"""The listener: tokens, strangers, the choice of a transport, and sinks that come and go."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport import shared_memory
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.double_buffer import Sender
from nemo_fp8rl.refit.transport.handshake import GREETINGS, Listener, connect
from nemo_fp8rl.refit.transport.link import LinkError
from tests.refit.transport.links import (
    AT_ONCE,
    CAPACITY,
    LONG,
    PROCESS_TRANSPORTS,
    SHORT,
    TOKEN,
    authenticated_caller,
    fill_and_send,
    frame,
    in_thread,
    raises_link_error,
    wait_until,
)


def test_a_wrong_token_is_refused_and_disturbs_nobody(cleanup, make_local_link):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    with raises_link_error("token differs"):
        connect(listener.address, "another run's", "sink", LONG)
    connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    cleanup.extend([listener.accept("sink", CAPACITY), connecting.result(AT_ONCE)])


def test_a_run_has_a_token():
    with pytest.raises(ValueError, match="empty"):
        Listener("shared_memory", "127.0.0.1", "", LONG)


STRANGERS = [
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\n\r\n",
    frame(b"#CHALLENGE#" + bytes(20)),
    frame(b""),
    struct.pack("!i", 2**30) + bytes(1000),
    struct.pack("!iQ", -1, 2**60),
    bytes(100_000),
]


def test_strangers_are_dropped_and_disturb_nobody(cleanup):
    listener = Listener("collective", "127.0.0.1", TOKEN, 2.0)
    cleanup.append(listener)
    strangers = [socket.create_connection(listener.address) for _ in STRANGERS]
    cleanup.extend(strangers)
    for stranger, data in zip(strangers, STRANGERS, strict=True):
        stranger.sendall(data)
    start = time.monotonic()
    connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    cleanup.extend([listener.accept("sink", CAPACITY), connecting.result(AT_ONCE)])
    assert time.monotonic() - start < 1.5  # before the silent one's deadline
    for stranger in strangers:
        stranger.settimeout(AT_ONCE)
        try:
            while stranger.recv(1000):  # the listener's challenge, then the end
                pass
        except ConnectionResetError:
            pass


def test_a_stranger_that_drips_is_dropped(cleanup):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, 1.0)
    stranger = socket.create_connection(listener.address)
    cleanup.extend([listener, stranger])
    stranger.sendall(struct.pack("!i", 200))
    with pytest.raises(OSError):
        for _ in range(50):  # a byte every 0.1 s, always within the timeout of one byte
            stranger.sendall(b"x")
            time.sleep(0.1)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"name": 3}', b"\xff", b"[" * 10_000, b" " * 100_000])
def test_a_malformed_greeting_is_dropped(cleanup, data):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    control = Control(socket.create_connection(listener.address), LONG, "the source")
    control.authenticate(TOKEN, is_caller=True)
    control.send(data)
    with raises_link_error("gone"):
        control.receive(1)


def test_silent_strangers_take_little_and_keep_nobody_out(cleanup, monkeypatch):
    monkeypatch.setattr("nemo_fp8rl.refit.transport.handshake.GREETING_SECONDS", 0.3)
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    before = threading.active_count()
    strangers = [socket.create_connection(listener.address) for _ in range(150)]
    time.sleep(0.1)
    assert threading.active_count() - before <= 2 * GREETINGS
    sink = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    cleanup.extend([listener.accept("sink", CAPACITY), sink.result(LONG)])
    for stranger in strangers:
        stranger.close()


def test_a_listener_without_a_thread_for_a_caller_goes_on(cleanup, monkeypatch):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    start, refused = threading.Thread.start, []

    def fail_once(thread):
        if thread.name == "refit caller" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with raises_link_error("gone"):
        connect(listener.address, TOKEN, "first", LONG)
    second = in_thread(connect, listener.address, TOKEN, "second", LONG)
    cleanup.extend([listener.accept("second", CAPACITY), second.result(LONG)])
    assert refused


def test_the_last_caller_of_a_name_counts(cleanup):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    first = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    while "sink" not in listener._callers:
        time.sleep(0.01)
    second = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    with raises_link_error("gone"):
        first.result(LONG)
    sender = listener.accept("sink", CAPACITY)
    cleanup.append(sender)
    fill_and_send(sender, b"to the second", b"")
    assert second.result(LONG).receive()[0] == b"to the second"


def test_a_caller_that_left_is_passed_over(cleanup):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    with authenticated_caller(listener, name="sink"):
        while "sink" not in listener._callers:
            time.sleep(0.01)
    accepting = in_thread(listener.accept, "sink", CAPACITY)
    time.sleep(0.1)
    connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    cleanup.extend([accepting.result(AT_ONCE), connecting.result(AT_ONCE)])


@pytest.mark.parametrize(
    ("device", "where", "transport"),
    [
        ("cpu", "near", "shared_memory"),
        ("cuda", "near", "cuda_ipc"),
        ("cpu", "elsewhere", "collective"),
        ("cuda", "elsewhere", "collective"),
    ],
)
def test_the_nearest_is_chosen_for_each_sink(cleanup, device, where, transport):
    listener = Listener("nearest", "127.0.0.1", TOKEN, LONG, torch.device(device))
    cleanup.append(listener)
    with authenticated_caller(
        listener, name="sink", domain=shared_memory.domain() if where == "near" else "elsewhere"
    ) as control:
        accepting = in_thread(listener.accept, "sink", CAPACITY)
        assert control.receive_fields(transport=str)["transport"] == transport
    with pytest.raises(RefitError):
        accepting.result(LONG)


def test_near_and_remote_sinks_get_the_same_messages(cleanup, monkeypatch):
    listener = Listener("nearest", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    connecting = {"near": in_thread(connect, listener.address, TOKEN, "near", LONG)}
    wait_until(lambda: "near" in listener._callers)
    local_domain = shared_memory.domain()
    monkeypatch.setattr(shared_memory, "domain", lambda: "elsewhere")
    connecting["remote"] = in_thread(connect, listener.address, TOKEN, "remote", LONG)
    wait_until(lambda: "remote" in listener._callers)
    monkeypatch.setattr(shared_memory, "domain", lambda: local_domain)
    for name, result in connecting.items():
        sender, receiver = listener.accept(name, CAPACITY), result.result(LONG)
        cleanup.extend([sender, receiver])
        assert (type(sender) is Sender) == (name == "near")  # collective links have a class of their own
        fill_and_send(sender, name.encode(), b"A" * CAPACITY)
        assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY


def test_sinks_are_told_apart_by_name(cleanup):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    connecting = {name: in_thread(connect, listener.address, TOKEN, name, LONG) for name in ("a", "b", "c")}
    for name in ("c", "a", "b"):
        sender = listener.accept(name, CAPACITY)
        cleanup.append(sender)
        fill_and_send(sender, name.encode(), b"")
    for name, result in connecting.items():
        receiver = result.result(LONG)
        cleanup.append(receiver)
        assert receiver.receive()[0] == name.encode()


def test_waits_without_a_sink_a_source_or_a_listener_end(cleanup):
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, SHORT)
    cleanup.append(listener)
    with raises_link_error(r"sink did not connect within 0\.5 s"):
        listener.accept("sink", CAPACITY)
    with raises_link_error(r"0\.5 s"):
        connect(listener.address, TOKEN, "sink", SHORT)
    listener.close()
    with raises_link_error("cannot reach"):
        connect(listener.address, TOKEN, "sink", LONG)


def test_closing_the_listener_wakes_waits_and_keeps_links(cleanup):
    listener = Listener("collective", "127.0.0.1", TOKEN, LONG)
    early = in_thread(connect, listener.address, TOKEN, "early", LONG)
    sender, receiver = listener.accept("early", CAPACITY), early.result(LONG)
    cleanup.extend([sender, receiver])
    waiting = in_thread(connect, listener.address, TOKEN, "late", LONG)
    while "late" not in listener._callers:
        time.sleep(0.01)
    accepting = in_thread(listener.accept, "never", CAPACITY)
    time.sleep(0.1)
    for _ in range(2):
        listener.close()
    with raises_link_error("closed"):
        accepting.result(LONG)
    with raises_link_error("gone"):
        waiting.result(LONG)
    fill_and_send(sender, b"still", b"near")
    assert receiver.receive()[0] == b"still"


@contextmanager
def offered_link(transport: str, cleanup: list) -> Iterator[tuple[Control, Future]]:
    """Yield the sink's control connection, which has read the offer of a link, and the source's pending accept."""
    listener = Listener(transport, "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    with authenticated_caller(listener, name="sink") as control:
        accepting = in_thread(listener.accept, "sink", CAPACITY)
        control.receive_fields(transport=str)
        control.receive_fields()
        yield control, accepting


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_sink_that_dies_while_the_link_is_made_ends_the_accept(cleanup, transport):
    with offered_link(transport, cleanup) as (_, accepting):
        pass
    with raises_link_error("gone"):
        accepting.result(LONG)


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_sink_that_refuses_sends_the_reason(cleanup, transport):
    with offered_link(transport, cleanup) as (control, accepting):
        control.refuse(LinkError("no room here \U0001f4a9" * 1000))
        with raises_link_error("sink: no room here"):
            accepting.result(LONG)


def listening_addresses() -> set[str]:
    """Return the hex addresses, as the kernel writes them, of this process's listening sockets."""
    sockets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            sockets.add(os.readlink(descriptor))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_every_socket_listens_on_the_given_host_alone(make_local_link, transport):
    with socket.create_server(("0.0.0.0", 0)) as anywhere:
        assert f"00000000:{anywhere.getsockname()[1]:04X}" in listening_addresses(), "the table is not being read"
    before = listening_addresses()
    make_local_link(transport)
    hosts = [address.partition(":")[0] for address in listening_addresses() - before]
    assert set(hosts) == {"0100007F"}  # 127.0.0.1
    assert len(hosts) >= (2 if transport == "collective" else 1)  # TCPStore's and gloo's besides the listener's
