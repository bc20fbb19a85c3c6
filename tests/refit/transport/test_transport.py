"""Links: every message whole and in order, two buffers, and an end to every wait."""

import errno
import gc
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport import collective, cuda_ipc, cuda_memory, nixl, shared_memory
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.double_buffer import Sender
from nemo_fp8rl.refit.transport.handshake import GREETINGS, Listener, connect
from nemo_fp8rl.refit.transport.in_process import in_process_link
from nemo_fp8rl.refit.transport.link import MAX_HEADER, LinkError
from tests.refit.memory_engine import TRANSPORTS
from tests.refit.remote_end import LocalEnd, RemoteEnd
from tests.refit.transport import fake_cuda_runtime

CAPACITY = 100_003
TOKEN = "token of the run"
BETWEEN = TRANSPORTS[1:]
LONG, SHORT = 20.0, 0.5
"""Timeouts that no passing test reaches, and one that a test waits for."""
AT_ONCE = 3.0
"""Seconds, on a loaded machine."""


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    """What is closed or killed after the test."""
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        thing.kill() if isinstance(thing, RemoteEnd) else thing.close()


@pytest.fixture
def linked(closing: list[Any]) -> Callable[..., tuple[Any, Any]]:
    """linked(transport, timeout) -> a sending end here and a receiving end, in another process where there are two."""

    def make(transport: str, timeout: float = LONG) -> tuple[Any, Any]:
        if transport == "in_process":
            sender, receiver = in_process_link(CAPACITY, timeout)
            closing.append(sender)
            return sender, LocalEnd(receiver)
        post, remote = Listener(transport, "127.0.0.1", TOKEN, LONG), RemoteEnd()  # type: ignore[arg-type]
        closing.extend([post, remote])
        remote.start("connect", post.address, TOKEN, "sink", LONG)
        sender: Any = post.accept("sink", CAPACITY)
        closing.append(sender)
        remote.result()
        sender._control.timeout = timeout  # once the link stands: a loaded machine may take its time
        remote.wait_at_most(timeout)
        return sender, remote

    return make


@pytest.fixture
def both_here(closing: list[Any]) -> Callable[..., tuple[Any, Any]]:
    """both_here(transport, timeout) -> both ends in this process, over the real connection."""

    def make(transport: Any, timeout: float = LONG, capacity: int = CAPACITY) -> tuple[Any, Any]:
        if transport == "in_process":
            return in_process_link(capacity, timeout)
        post = Listener(transport, "127.0.0.1", TOKEN, LONG)
        closing.append(post)
        dialing = later(connect, post.address, TOKEN, "sink", LONG)
        ends = (post.accept("sink", capacity), dialing.result(LONG))
        for end in ends:
            end._control.timeout = timeout  # type: ignore[attr-defined]
            closing.append(end)
        return ends

    return make


def later(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """The call in a thread of its own."""
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
def fails(match: str = ".", within: float = AT_ONCE) -> Iterator[None]:
    start = time.monotonic()
    with pytest.raises(LinkError, match=match):
        yield
    assert time.monotonic() - start < within


def until(what: Callable[[], object], within: float = AT_ONCE) -> None:
    deadline = time.monotonic() + within
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert what()


# What a link carries


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_arrive_to_the_bit_and_in_order(linked, transport):
    rng = random.Random(0)
    sizes = [0, 1, 4097, CAPACITY, 0, *(rng.randrange(CAPACITY + 1) for _ in range(50))]
    messages = [(rng.randbytes(rng.choice([0, 1, 300])), rng.randbytes(size)) for size in sizes]
    messages[7] = (rng.randbytes(MAX_HEADER), b"payload of the longest header")
    sender, receiver = linked(transport)
    sending = later(lambda: [fill_and_send(sender, *message) for message in messages])
    for message in messages:
        assert receiver.receive() == message
        receiver.release()
    sending.result(LONG)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_sender_runs_one_message_ahead_and_no_further(linked, transport):
    sender, receiver = linked(transport)
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive() == (b"a", b"A" * CAPACITY)
    assert later(sender.acquire_buffer).result(AT_ONCE) is not None  # while the receiver holds one
    fill_and_send(sender, b"b", b"B" * CAPACITY)
    assert receiver.receive() == (b"b", b"B" * CAPACITY)
    third = later(fill_and_send, sender, b"c", b"C" * CAPACITY)
    time.sleep(0.3)
    assert not third.done()  # while it holds two
    assert receiver.oldest_held() == b"A" * CAPACITY
    receiver.release()
    third.result(AT_ONCE)
    assert receiver.oldest_held() == b"B" * CAPACITY  # still held
    receiver.release()
    assert receiver.receive() == (b"c", b"C" * CAPACITY)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_may_wait_unreleased_for_longer_than_the_timeout(linked, transport):
    sender, receiver = linked(transport, SHORT)
    fill_and_send(sender, b"a", b"A")
    time.sleep(2 * SHORT)  # between refits nobody waits, so nobody is late
    assert receiver.receive() == (b"a", b"A")
    fill_and_send(sender, b"b", b"B")
    assert receiver.receive() == (b"b", b"B")


@pytest.fixture(scope="module")
def one_link() -> Iterator[tuple[Any, Any]]:
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    dialing = later(connect, post.address, TOKEN, "sink", LONG)
    sender = post.accept("sink", CAPACITY)
    yield sender, dialing.result(LONG)
    sender.close()
    post.close()


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=5000)), max_size=8))
def test_any_messages_come_out_as_they_went_in(one_link, messages):
    sender, receiver = one_link
    got = []
    for index, message in enumerate(messages):
        if index >= 2:
            receiver.release()
        fill_and_send(sender, *message)
        header, payload = receiver.receive()
        got.append((header, payload.numpy().tobytes()))
    for _ in messages[-2:]:
        receiver.release()
    assert got == messages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_no_message_can_be_is_not_sent(linked, transport):
    sender, receiver = linked(transport)
    sender.acquire_buffer()
    for header, nbytes in [(b"h" * (MAX_HEADER + 1), 1), (b"h", CAPACITY + 1), (b"h", -1)]:
        with fails("bytes"):
            sender.send(header, nbytes)
    fill_and_send(sender, b"after", b"all")
    assert receiver.receive() == (b"after", b"all")


@pytest.mark.parametrize("transport", BETWEEN)
def test_buffers_are_aligned_for_every_dtype(both_here, transport):
    sender, receiver = both_here(transport, capacity=1001)
    for _ in range(2):
        buffer = sender.acquire_buffer()
        assert buffer.data_ptr() % 64 == 0
        sender.send(b"", 8)
        assert receiver.receive()[1].data_ptr() % 64 == 0


# The end of a wait


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_silence_ends_in_a_link_error_that_names_the_seconds(linked, transport):
    sender, receiver = linked(transport, SHORT)
    with fails("0.5 s"):
        receiver.receive()
    for _ in range(2):
        fill_and_send(sender, b"", b"x")
    with fails("0.5 s"):
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_the_sender_wakes_a_receiver_that_waits(linked, transport):
    sender, receiver = linked(transport)
    waiting = later(receiver.receive)
    time.sleep(0.2)
    for _ in range(2):
        sender.close()
    with fails():
        waiting.result(LONG)
    with fails():
        sender.acquire_buffer()
    with fails():
        receiver.receive()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_close_wakes_both_sides_when_the_sender_waits(linked, transport, closer):
    sender, receiver = linked(transport)
    for _ in range(2):
        fill_and_send(sender, b"", b"x")
    waiting = later(sender.acquire_buffer)
    time.sleep(0.2)
    for _ in range(2):
        (sender if closer == "sender" else receiver).close()
    with fails():
        waiting.result(LONG)
    with fails():
        sender.acquire_buffer()
    if closer == "receiver":
        with fails("closed"):
            receiver.receive()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_can_be_closed_while_it_waits(both_here, transport):
    sender, receiver = both_here(transport)
    waiting = later(receiver.receive)
    time.sleep(0.2)
    receiver.close()
    with fails("closed"):
        waiting.result(LONG)
    with fails():
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_killed_sender_ends_the_receivers_wait(closing, transport):
    remote = RemoteEnd()
    closing.append(remote)
    address = remote.listen(transport, TOKEN, LONG)
    remote.start("accept", "sink", CAPACITY)
    receiver = connect(address, TOKEN, "sink", LONG)
    remote.result()
    remote.fill_and_send(b"the last", b"words" * 1000)
    header, payload = receiver.receive()
    waiting = later(receiver.receive)
    time.sleep(0.2)
    remote.kill()
    with fails("gone"):
        waiting.result(LONG)
    with fails("gone"):
        receiver.receive()
    receiver.release()
    assert (header, payload.numpy().tobytes()) == (b"the last", b"words" * 1000)  # its memory outlives the sender


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_killed_receiver_ends_the_senders_wait(linked, transport):
    sender, receiver = linked(transport)
    for _ in range(2):
        fill_and_send(sender, b"", b"x" * CAPACITY)
    waiting = later(sender.acquire_buffer)
    time.sleep(0.2)
    receiver.kill()
    with fails("gone"):
        waiting.result(LONG)
    with fails("gone"):
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_killed_receiver_is_noticed_while_a_buffer_is_free(linked, transport):
    sender, receiver = linked(transport)
    receiver.kill()
    with fails("gone"):
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_process_leaves_while_its_link_waits(linked, transport):
    """No thread of a link keeps a process, or crashes it."""
    sender, receiver = linked(transport)
    fill_and_send(sender, b"", b"x")
    receiver.receive()
    receiver.leave()
    receiver.process.join(AT_ONCE)
    assert receiver.process.exitcode == 0


WAITS_AND_LEAVES = """
import contextlib, socket, sys, threading, time
from nemo_fp8rl.refit.transport import collective
from nemo_fp8rl.refit.transport.control import Control

class SlowToEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # as modules are taken down, by when the wait is over

def offer(control):
    with contextlib.suppress(collective.LinkError):
        collective.offer(control, 100, store, store.port)

def start(thread, start=threading.Thread.start):
    if thread.name == "refit group":
        begun["starting"].set()
        time.sleep(0.5)
    start(thread)
    if thread.name == "refit group":
        begun["waiting"].set()

begun = {"starting": threading.Event(), "waiting": threading.Event()}
threading.Thread.start = start
listener = socket.create_server(("127.0.0.1", 0))
caller = socket.create_connection(listener.getsockname())
here, there = Control(caller, 1.0, "sink"), Control(listener.accept()[0], 1.0, "source")
store = collective.listen("127.0.0.1", 1.0)
slow = SlowToEnd()
threading.Thread(target=offer, args=(here,), daemon=True).start()
there.hear(port=int, prefix=str)
begun[sys.argv[1]].wait()
print("leaves", flush=True)
"""


@pytest.mark.parametrize("when", ["starting", "waiting"])
def test_a_process_may_leave_while_it_waits_for_the_other_end_of_a_group(when):
    done = subprocess.run(
        [sys.executable, "-c", WAITS_AND_LEAVES, when], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")


def making() -> bool:
    return any(thread.name == "refit group" for thread in threading.enumerate())


@pytest.mark.parametrize("waits", ["source", "sink"])
def test_who_waits_for_an_end_that_is_gone_gives_up_at_once(waits, closing):
    listener = socket.create_server(("127.0.0.1", 0))
    closing.append(listener)
    here = Control(socket.create_connection(listener.getsockname()), LONG, "the other")
    there = Control(listener.accept()[0], LONG, "this one")
    nowhere = socket.create_server(("127.0.0.1", 0))
    port = nowhere.getsockname()[1]
    nowhere.close()  # where a source was
    if waits == "source":
        store = collective.listen("127.0.0.1", LONG)
        joining = later(collective.offer, here, CAPACITY, store, store.port)
        there.hear(port=int, prefix=str)
    else:
        joining = later(collective.take, here, CAPACITY)
        there.say(port=port, prefix="x")
    until(making)
    there.close()
    with fails("the other is gone"):
        joining.result(AT_ONCE)
    until(lambda: not making())


def test_a_payload_that_never_comes_ends_the_wait(both_here):
    sender, receiver = both_here("collective", SHORT)
    sender._control.send(struct.pack("<cQ", b"M", 100) + b"header")
    time.sleep(SHORT + 0.3)
    with fails(r"0\.5 s"):
        receiver.receive()


# What is not a message


def framed(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


@pytest.mark.parametrize(
    "said",
    [
        framed(b""),
        framed(b"M"),
        framed(b"R"),
        framed(b"X" + bytes(8)),
        framed(struct.pack("<cQ", b"M", CAPACITY + 1)),
        framed(struct.pack("<cQ", b"M", 2**64 - 1)),
        struct.pack("!i", MAX_HEADER + 10),
        struct.pack("!iQ", -1, 2**63),
        struct.pack("!i", -7),
        struct.pack("!i", 0x7FFFFFFF) + b"garbage",
        framed(struct.pack("<cQ", b"M", 0)) * 3 + b"a third message into two buffers",
    ],
    ids=repr,
)
@pytest.mark.parametrize("transport", BETWEEN)
def test_garbage_for_the_receiver_is_a_link_error(both_here, transport, said):
    sender, receiver = both_here(transport)
    os.write(sender._control._connection.fileno(), said)
    with fails():
        for _ in range(3):
            receiver.receive()
    with fails():  # the sender learns it too
        for _ in range(100):
            sender.acquire_buffer()
            time.sleep(0.02)


@pytest.mark.parametrize("said", [framed(b""), framed(b"M"), framed(b"RR"), struct.pack("!i", 2**30), framed(b"R")])
@pytest.mark.parametrize("full", [True, False])
def test_garbage_for_the_sender_is_a_link_error(both_here, said, full):
    sender, receiver = both_here("shared_memory")
    for _ in range(2 if full else 0):
        fill_and_send(sender, b"", b"x")
    os.write(receiver._control._connection.fileno(), said * 3)  # three releases for two messages
    with fails():
        for _ in range(100):
            sender.acquire_buffer()
            time.sleep(0.02)
    with fails():
        receiver.receive() and receiver.receive() and receiver.receive()


def test_half_a_message_is_silence():
    with connected(SHORT) as (source, sink):
        os.write(source._connection.fileno(), framed(b"a message")[:-3])
        with fails(r"within a message for 0\.5 s"):
            sink.receive(100)
        with fails("gone"):  # what comes later could not be told from the rest of it
            source.receive(100)


def test_a_side_that_stops_reading_is_silent():
    with connected(SHORT) as (source, _), fails(r"0\.5 s"):
        source.send(bytes(MAX_HEADER))


@contextmanager
def connected(timeout: float) -> Iterator[tuple[Control, Control]]:
    """A control connection that is not authenticated: the source's side and the sink's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        pair = Control(listener.accept()[0], timeout, "the sink"), Control(calling, timeout, "the source")
    yield pair
    for control in pair:
        control.close()


# The post


def test_a_wrong_token_is_refused_and_disturbs_nobody(closing, both_here):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    with fails("token differs"):
        connect(post.address, "another run's", "sink", LONG)
    dialing = later(connect, post.address, TOKEN, "sink", LONG)
    closing.extend([post.accept("sink", CAPACITY), dialing.result(AT_ONCE)])


def test_a_run_has_a_token():
    with pytest.raises(ValueError, match="empty"):
        Listener("shared_memory", "127.0.0.1", "", LONG)


STRANGERS = [
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\n\r\n",
    framed(b"#CHALLENGE#" + bytes(20)),
    framed(b""),
    struct.pack("!i", 2**30) + bytes(1000),
    struct.pack("!iQ", -1, 2**60),
    bytes(100_000),
]


def test_strangers_neither_block_nor_break_the_others_and_are_dropped(closing):
    post = Listener("collective", "127.0.0.1", TOKEN, 2.0)
    closing.append(post)
    strangers = [socket.create_connection(post.address) for _ in STRANGERS]
    closing.extend(strangers)
    for stranger, said in zip(strangers, STRANGERS, strict=True):
        stranger.sendall(said)
    start = time.monotonic()
    dialing = later(connect, post.address, TOKEN, "sink", LONG)
    closing.extend([post.accept("sink", CAPACITY), dialing.result(AT_ONCE)])
    assert time.monotonic() - start < 1.5  # before the silent one's deadline
    for stranger in strangers:
        stranger.settimeout(AT_ONCE)
        try:
            while stranger.recv(1000):  # the post's challenge, then the end
                pass
        except ConnectionResetError:
            pass


def test_a_stranger_that_drips_is_dropped(closing):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, 1.0)
    stranger = socket.create_connection(post.address)
    closing.extend([post, stranger])
    stranger.sendall(struct.pack("!i", 200))
    with pytest.raises(OSError):
        for _ in range(50):  # a byte every 0.1 s, always within the wait for one
            stranger.sendall(b"x")
            time.sleep(0.1)


@contextmanager
def caller(post: Listener, **greeting: Any) -> Iterator[Control]:
    """A sink that knows the token and then says what it likes."""
    control = Control(socket.create_connection(post.address), LONG, "the source")
    control.authenticate(TOKEN, calling=True)
    control.say(**{"domain": shared_memory.domain()} | greeting)
    yield control
    control.close()


@pytest.mark.parametrize("said", [b"", b"[]", b"null", b"{}", b'{"name": 3}', b"\xff", b"[" * 10_000, b" " * 100_000])
def test_a_greeting_that_is_none_is_dropped(closing, said):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    control = Control(socket.create_connection(post.address), LONG, "the source")
    control.authenticate(TOKEN, calling=True)
    control.send(said)
    with fails("gone"):
        control.receive(1)


def test_strangers_that_say_nothing_take_little_and_keep_nobody_out(closing, monkeypatch):
    monkeypatch.setattr("nemo_fp8rl.refit.transport.handshake.GREETING_SECONDS", 0.3)
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    before = threading.active_count()
    strangers = [socket.create_connection(post.address) for _ in range(150)]
    time.sleep(0.1)
    assert threading.active_count() - before <= 2 * GREETINGS
    sink = later(connect, post.address, TOKEN, "sink", LONG)
    closing.extend([post.accept("sink", CAPACITY), sink.result(LONG)])
    for stranger in strangers:
        stranger.close()


def test_a_post_without_a_thread_for_a_caller_goes_on(closing, monkeypatch):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    start, refused = threading.Thread.start, []

    def none_left(thread):
        if thread.name == "refit caller" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with fails("gone"):
        connect(post.address, TOKEN, "first", LONG)
    second = later(connect, post.address, TOKEN, "second", LONG)
    closing.extend([post.accept("second", CAPACITY), second.result(LONG)])
    assert refused


def test_the_last_caller_of_a_name_counts(closing):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    first = later(connect, post.address, TOKEN, "sink", LONG)
    while "sink" not in post._callers:
        time.sleep(0.01)
    second = later(connect, post.address, TOKEN, "sink", LONG)
    with fails("gone"):
        first.result(LONG)
    sender = post.accept("sink", CAPACITY)
    closing.append(sender)
    fill_and_send(sender, b"to the second", b"")
    assert second.result(LONG).receive()[0] == b"to the second"


def test_a_caller_that_left_is_passed_over(closing):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    with caller(post, name="sink"):
        while "sink" not in post._callers:
            time.sleep(0.01)
    accepting = later(post.accept, "sink", CAPACITY)
    time.sleep(0.1)
    dialing = later(connect, post.address, TOKEN, "sink", LONG)
    closing.extend([accepting.result(AT_ONCE), dialing.result(AT_ONCE)])


@pytest.mark.parametrize(
    ("device", "where", "transport"),
    [
        ("cpu", "here", "shared_memory"),
        ("cuda", "here", "cuda_ipc"),
        ("cpu", "elsewhere", "collective"),
        ("cuda", "elsewhere", "collective"),
    ],
)
def test_the_nearest_is_chosen_for_each_sink(closing, device, where, transport):
    post = Listener("nearest", "127.0.0.1", TOKEN, LONG, torch.device(device))
    closing.append(post)
    with caller(post, name="sink", domain=shared_memory.domain() if where == "here" else "elsewhere") as control:
        accepting = later(post.accept, "sink", CAPACITY)
        assert control.hear(transport=str)["transport"] == transport
    with pytest.raises(RefitError):
        accepting.result(LONG)


def test_near_and_far_sinks_of_one_post_get_the_same_messages(closing, monkeypatch):
    post = Listener("nearest", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    dialing = {"near": later(connect, post.address, TOKEN, "near", LONG)}
    until(lambda: "near" in post._callers)
    here = shared_memory.domain()
    monkeypatch.setattr(shared_memory, "domain", lambda: "elsewhere")
    dialing["remote"] = later(connect, post.address, TOKEN, "remote", LONG)
    until(lambda: "remote" in post._callers)
    monkeypatch.setattr(shared_memory, "domain", lambda: here)
    for name, result in dialing.items():
        sender, receiver = post.accept(name, CAPACITY), result.result(LONG)
        closing.extend([sender, receiver])
        assert (type(sender) is Sender) == (name == "near")  # the collective's has a class of its own
        fill_and_send(sender, name.encode(), b"A" * CAPACITY)
        assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY


def test_a_domain_is_that_of_the_machine_and_its_dev_shm(monkeypatch, tmp_path):
    mine = shared_memory.domain()
    script = "from nemo_fp8rl.refit.transport.shared_memory import domain; print(domain())"
    other = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == mine
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    assert shared_memory.domain() != mine
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "missing")
    assert shared_memory.domain().endswith(f"/{os.getpid()}")


def test_sinks_are_told_apart_by_name(closing):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    dialing = {name: later(connect, post.address, TOKEN, name, LONG) for name in ("a", "b", "c")}
    for name in ("c", "a", "b"):
        sender = post.accept(name, CAPACITY)
        closing.append(sender)
        fill_and_send(sender, name.encode(), b"")
    for name, result in dialing.items():
        receiver = result.result(LONG)
        closing.append(receiver)
        assert receiver.receive()[0] == name.encode()


def test_nobody_calls_nobody_accepts_nobody_listens(closing):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, SHORT)
    closing.append(post)
    with fails(r"sink did not call within 0\.5 s"):
        post.accept("sink", CAPACITY)
    with fails(r"0\.5 s"):
        connect(post.address, TOKEN, "sink", SHORT)
    post.close()
    with fails("cannot reach"):
        connect(post.address, TOKEN, "sink", LONG)


def test_closing_the_post_wakes_who_waits_there_and_leaves_links_alone(closing):
    post = Listener("collective", "127.0.0.1", TOKEN, LONG)
    early = later(connect, post.address, TOKEN, "early", LONG)
    sender, receiver = post.accept("early", CAPACITY), early.result(LONG)
    closing.extend([sender, receiver])
    waiting = later(connect, post.address, TOKEN, "late", LONG)
    while "late" not in post._callers:
        time.sleep(0.01)
    accepting = later(post.accept, "never", CAPACITY)
    time.sleep(0.1)
    for _ in range(2):
        post.close()
    with fails("closed"):
        accepting.result(LONG)
    with fails("gone"):
        waiting.result(LONG)
    fill_and_send(sender, b"still", b"here")
    assert receiver.receive()[0] == b"still"


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_sink_that_dies_while_the_link_is_made_ends_the_accept(closing, transport):
    post = Listener(transport, "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    with caller(post, name="sink") as control:
        accepting = later(post.accept, "sink", CAPACITY)
        control.hear(transport=str)
        control.hear()
    with fails("gone"):
        accepting.result(LONG)


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_sink_that_cannot_says_why(closing, transport):
    post = Listener(transport, "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    with caller(post, name="sink") as control:
        accepting = later(post.accept, "sink", CAPACITY)
        control.hear(transport=str)
        control.hear()
        control.refuse(LinkError("no room here \U0001f4a9" * 1000))
        with fails("sink: no room here"):
            accepting.result(LONG)


LEAVES = """
import atexit, threading
atexit.register(lambda: print(*(thread.name for thread in threading.enumerate()), sep=","))  # the last of its kind
from concurrent.futures import ThreadPoolExecutor
from nemo_fp8rl.refit.transport.handshake import GREETINGS, Listener, connect
from tests.refit import fake_cuda_runtime
fake_cuda_runtime.install()
post = Listener("{transport}", "127.0.0.1", "token", 20)
with ThreadPoolExecutor(1) as threads:
    dialing = threads.submit(connect, post.address, "token", "sink", 20)
    sender, receiver = post.accept("sink", 4096), dialing.result()
sender.acquire_buffer()
sender.send(b"a", 4096)
receiver.receive()
assert any(thread.name == "refit link" for thread in threading.enumerate())
"""


@pytest.mark.parametrize("transport", BETWEEN)
def test_a_process_that_ends_has_its_threads_let_go_of_the_buffers_first(transport):
    script = LEAVES.format(transport=transport)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not {"refit link", "refit nixl"} & set(done.stdout.strip().split(","))


def nixl_offer(**changed: Any) -> bytes:
    offer = {"metadata": "", "addresses": [4096, 8192], "memory": "DRAM", "device": 0}
    return json.dumps(offer | changed).encode()


@pytest.mark.parametrize(
    "said",
    [
        [b"garbage"],
        [b'{"transport": "pigeon", "capacity": 5}'],
        [b'{"transport": "shared_memory", "capacity": 0}', b'{"file": "nemo_fp8rl-x"}'],
        [b'{"transport": "shared_memory", "capacity": true}', b'{"file": "nemo_fp8rl-x"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "nemo_fp8rl-that-is-not-there"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "nemo_fp8rl-/../../etc/passwd"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "../../etc/passwd"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": "nemo_fp8rl-\\u0000"}'],
        [b'{"transport": "shared_memory", "capacity": 5}', b'{"file": 5}'],
        [b'{"transport": "cuda_ipc", "capacity": 5}', b'{"handle": 5}'],
        [b'{"transport": "cuda_ipc", "capacity": 5}', b'{"handle": "not hexadecimal"}'],
        [b'{"transport": "cuda_ipc", "capacity": 5}', b'{"handle": "00ff"}'],
        [b'{"transport": "nixl", "capacity": 5}', b'{"metadata": "x"}'],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(metadata="no base64")],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(metadata="bm9uc2Vuc2U=")],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(addresses=[4096])],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(addresses=[4096, "4096"])],
        [b'{"transport": "nixl", "capacity": 5}', nixl_offer(memory="FILE")],
        [b'{"transport": "collective", "capacity": 5}', b'{"port": 1, "prefix": "x"}'],
        [b'{"transport": "collective", "capacity": 5}', b'{"port": 1000000, "prefix": "x"}'],
        [b'{"transport": "collective", "capacity": 5}', b'{"port": -1}'],
        [b'{"transport": "collective", "capacity": %d}' % 2**60],
        [b'{"transport": "collective", "capacity": %d}' % 2**70],
    ],
    ids=lambda said: said[-1].decode(),
)
def test_a_sink_takes_no_nonsense_for_an_offer(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialing = later(connect, listener.getsockname(), TOKEN, "sink", 1.0)
        control = Control(listener.accept()[0], LONG, "the sink")
        control.authenticate(TOKEN, calling=False)
        assert control.hear(name=str) == {"name": "sink", "domain": shared_memory.domain()}
        for message in said:
            control.send(message)
        with fails(within=LONG / 2):  # where it dials on, that has its own timeout, which torch waits for twice
            dialing.result(LONG)
        with fails():  # and the source hears of it
            control.hear(mapped=bool)


def test_a_collective_link_without_memory_says_so_on_both_sides_at_once(closing):
    post = Listener("collective", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    dialing = later(connect, post.address, TOKEN, "sink", LONG)
    for call in (lambda: post.accept("sink", 2**50), lambda: dialing.result(AT_ONCE)):
        with pytest.raises(LinkError, match=r"set a smaller nemo_fp8rl\.refit\.bucket_bytes"):
            call()


def test_a_file_that_is_not_two_buckets_is_not_mapped(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    (tmp_path / "nemo_fp8rl-short").write_bytes(bytes(4096))
    with connected(LONG) as (source, sink):
        source.say(file="nemo_fp8rl-short")
        with fails("not two buckets"):
            shared_memory.take(sink, 4096)


# Memory of a GPU


@pytest.fixture
def refused(closing: list[Any]) -> Callable[[Any, str, str], None]:
    """refused(transport, source, sink): no link is made, and what either side says of it matches."""

    def check(transport: Any, source: str, sink: str) -> None:
        post = Listener(transport, "127.0.0.1", TOKEN, LONG)
        closing.append(post)
        dialing = later(connect, post.address, TOKEN, "sink", LONG)
        with pytest.raises(RefitError, match=source):
            post.accept("sink", CAPACITY)
        with fails(sink):
            dialing.result(LONG)

    return check


def test_a_gpu_without_room_says_what_to_set_on_both_sides(refused, monkeypatch, cuda_runtime):
    monkeypatch.setattr(cuda_runtime, "capacity", 1000)
    said = r"0\.1 MiB .*out of memory.*transport=shared_memory.*refit\.bucket_bytes"
    refused("cuda_ipc", said, said)


@pytest.fixture
def maps_nothing(monkeypatch, cuda_runtime) -> None:
    """As between GPUs that do not reach each other's memory."""
    failed = cuda_runtime.cudaError_t.cudaErrorMapBufferObjectFailed
    monkeypatch.setattr(cuda_runtime, "cudaIpcOpenMemHandle", lambda handle, flags: (failed, None))


def test_memory_that_cannot_be_mapped_says_what_to_set_on_both_sides(refused, maps_nothing):
    said = r"sink cannot map .*on cpu: mapping of buffer.*transport=shared_memory, or collective where .* several"
    refused("cuda_ipc", said, said)


def test_the_nearest_is_shared_memory_where_a_gpus_cannot_be_mapped(
    closing, maps_nothing, monkeypatch, caplog, cuda_runtime
):
    monkeypatch.setattr(cuda_ipc, "LATER", cuda_memory.Collector("test free", 0.0))  # waits for no other
    post, before = Listener("nearest", "127.0.0.1", TOKEN, LONG), set(cuda_runtime.allocated)
    monkeypatch.setattr(post, "_suited", lambda domain: "cuda_ipc")  # as for weights on a GPU
    closing.append(post)
    files = set(link_files())
    dialing = later(connect, post.address, TOKEN, "sink", LONG)
    sender, receiver = post.accept("sink", CAPACITY), dialing.result(LONG)
    closing.extend([sender, receiver])
    assert len(set(link_files()) - files) == 1  # that both ends map
    until(lambda: set(cuda_runtime.allocated) <= before)
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY
    (said,) = [record for record in caplog.records if record.name == Listener.__module__]
    assert said.getMessage() == (
        "sink cannot map this rank's GPU memory (on cpu: mapping of buffer object failed): "
        "what it takes goes through the host's shared memory"
    )


def test_weights_that_are_not_on_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(cuda_memory, "DEVICE_TYPE", "cuda")
    with connected(LONG) as (source, sink):
        with pytest.raises(RefitError, match=r"weights are on the cpu.*transport=shared_memory"):
            cuda_ipc.offer(source, CAPACITY, torch.device("cpu"))
        source.say(handle=bytes(64).hex())
        assert cuda_ipc.take(sink, CAPACITY, torch.device("cpu")) is None
        assert source.hear(mapped=bool, why=str) == {"mapped": False, "why": "on cpu: weights are on the cpu"}


def test_without_cudas_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, fake_cuda_runtime.NAME, None)
    missing = pytest.raises(RefitError, match=r"pip install cuda-bindings.*transport=shared_memory")
    with connected(LONG) as (source, _), missing:
        cuda_ipc.offer(source, CAPACITY, torch.device("cpu"))


def test_the_sink_lets_go_of_the_memory_at_once_and_the_source_later(both_here, closing, cuda_runtime, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "LATER", cuda_memory.Collector("test free", 1.0))
    sender, receiver = both_here("cuda_ipc")
    theirs, ours = sender._buffers.address, receiver._buffers.address
    assert theirs in cuda_runtime.allocated and ours in cuda_runtime.opened
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY
    sender.close()
    receiver.close()
    closing.clear()
    gc.disable()  # nothing waits for it
    try:
        del receiver
        until(lambda: ours not in cuda_runtime.opened)
        start = time.monotonic()
        del sender
        until(lambda: theirs not in cuda_runtime.allocated)
        assert time.monotonic() - start >= 1.0
    finally:
        gc.enable()


# NIXL

needs_nixl = pytest.mark.skipif("nixl" not in TRANSPORTS, reason="nixl is not installed: make test-nixl")


def test_without_nixl_its_package_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    monkeypatch.setattr(nixl, "_agents", {})
    said = r"pip install 'nemo-fp8rl\[nixl\]'.*set nemo_fp8rl\.refit\.transport=auto"
    refused("nixl", said, said)


@needs_nixl
def test_a_gpu_without_room_for_nixls_buckets_says_what_to_set_on_both_sides(refused, monkeypatch, cuda_runtime):
    monkeypatch.setattr(cuda_runtime, "capacity", 1000)
    said = r"0\.1 MiB .*out of memory.*transport=auto, or a smaller nemo_fp8rl\.refit\.bucket_bytes"
    refused("nixl", said, said)


@needs_nixl
@pytest.mark.parametrize("ends", ["sender", "receiver", "connection", "nobody"])
def test_nixl_keeps_nothing_of_a_link_that_ended(both_here, closing, monkeypatch, cuda_runtime, ends):
    monkeypatch.setattr(nixl, "GRACE", 0.1)
    other, _ = both_here("nixl")  # which stands
    sender, receiver = both_here("nixl")
    source, sink = sender._agent, receiver._held.agent
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY
    remote, links = receiver._remote, sink._remotes[receiver._remote]
    buckets = {sender._buffers.address, receiver._buffers.address}  # as on a GPU: of no allocator of torch's
    assert buckets <= cuda_runtime.allocated.keys()
    if ends != "nobody":
        {"sender": sender, "receiver": receiver, "connection": sender._control}[ends].close()
    closing[:] = [thing for thing in closing if thing is not sender and thing is not receiver]
    del sender, receiver
    until(lambda: not buckets & cuda_runtime.allocated.keys() and sink._remotes[remote] < links)
    assert source._thread is not None
    other.acquire_buffer()


@needs_nixl
def test_a_sink_that_gives_up_within_a_transfer_lets_go_of_it_once_it_has_ended(both_here, monkeypatch):
    sender, receiver = both_here("nixl", LONG)
    agent, states = receiver._held.agent, ["PROC"]
    monkeypatch.setattr(agent._nixl, "check_xfer_state", lambda handle: states[0])
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    until(lambda: receiver._moving is not None)
    receiver.close()
    time.sleep(0.3)
    assert receiver._moving is not None and agent._remotes[receiver._remote] >= 1
    before, states[0] = agent._remotes[receiver._remote], "DONE"
    until(lambda: receiver._moving is None and agent._remotes[receiver._remote] < before)
    assert not nixl._stuck


@needs_nixl
@pytest.mark.parametrize("leaves", ["source", "sink"])
def test_a_process_that_leaves_right_after_a_link_ended_is_not_aborted(leaves):
    """Ten at once: Python would end threads that are within NIXL in a way that aborts it."""
    script = """
import sys, threading
from nemo_fp8rl.refit.transport.handshake import GREETINGS, Listener, connect
post = Listener("nixl", "127.0.0.1", "token", 20.0)
ends = {}
taking = threading.Thread(target=lambda: ends.update(sink=connect(post.address, "token", "sink", 20.0)))
taking.start()
ends["source"] = post.accept("sink", 1 << 20)
taking.join()
for _ in range(20):
    ends["source"].acquire_buffer()
    ends["source"].send(b"", 1 << 20)
    ends["sink"].receive()
    ends["sink"].release()
ends[sys.argv[1]].close()
"""
    command = [sys.executable, "-c", script, leaves]
    with ExitStack() as stack:
        leaving = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(10)]
        for process in leaving:
            stack.callback(process.kill)
        for process in leaving:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said[-2000:]


# Shared memory


def link_files() -> list[str]:
    """The files of links that this process maps, as the kernel names them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if shared_memory.PREFIX in line]


def test_the_file_has_no_name_once_the_link_stands(linked):
    before = set(link_files())
    _, receiver = linked("shared_memory")
    (mapped,) = set(link_files()) - before
    assert mapped.startswith("/dev/shm/")
    assert mapped.endswith(" (deleted)")
    receiver.kill()
    assert not Path(mapped.removesuffix(" (deleted)")).exists()


@pytest.fixture
def own_prefix(monkeypatch) -> Callable[[], list[Path]]:
    """own_prefix() -> the files in /dev/shm that links of this test alone have left."""
    prefix = f"nemo_fp8rl-test-{os.getpid()}-{time.monotonic_ns()}-"
    monkeypatch.setattr(shared_memory, "PREFIX", prefix)
    return lambda: list(Path("/dev/shm").glob(f"{prefix}*"))


def test_the_file_goes_when_the_sink_never_maps_it(closing, own_prefix):
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    with caller(post, name="sink") as control:
        accepting = later(post.accept, "sink", CAPACITY)
        control.hear(transport=str)
        control.hear(file=str)
        (path,) = own_prefix()
        assert path.stat().st_mode & 0o777 == 0o600
    with fails():
        accepting.result(LONG)
    assert own_prefix() == []


FIXES = ("nemo_fp8rl.refit.bucket_bytes", "nemo_fp8rl.refit.transport=collective", "/dev/shm larger")


@pytest.mark.parametrize("real", [True, False])
def test_a_dev_shm_that_is_too_small_names_the_three_fixes_on_both_sides(closing, monkeypatch, own_prefix, real):
    space = os.statvfs("/dev/shm")
    capacity = space.f_blocks * space.f_frsize if real else CAPACITY
    if not real:
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    dialing = later(connect, post.address, TOKEN, "sink", LONG)
    for call in (lambda: post.accept("sink", capacity), lambda: dialing.result(AT_ONCE)):
        with pytest.raises(RefitError) as caught:
            call()
        assert all(fix in str(caught.value) for fix in FIXES)
        assert f"{2 * -(-capacity // 4096) * 4096 / 2**20:.1f} MiB" in str(caught.value)
    assert own_prefix() == []


def test_pages_are_reserved_before_the_sink_hears_of_the_file(closing, own_prefix):
    """One that is missing later would be a SIGBUS."""
    post = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    closing.append(post)
    with caller(post, name="sink") as control:
        later(post.accept, "sink", CAPACITY)
        control.hear(transport=str)
        control.hear(file=str)
        assert own_prefix()[0].stat().st_blocks * 512 >= 2 * CAPACITY


# Where it listens


def listening_addresses() -> set[str]:
    """Hex addresses, as the kernel writes them, of this process's listening sockets."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            own.add(os.readlink(descriptor))
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


@pytest.mark.parametrize("transport", BETWEEN)
def test_every_socket_listens_on_the_given_host_alone(both_here, transport):
    with socket.create_server(("0.0.0.0", 0)) as anywhere:
        assert f"00000000:{anywhere.getsockname()[1]:04X}" in listening_addresses(), "the table is not being read"
    before = listening_addresses()
    both_here(transport)
    hosts = [address.partition(":")[0] for address in listening_addresses() - before]
    assert set(hosts) == {"0100007F"}  # 127.0.0.1
    assert len(hosts) >= (2 if transport == "collective" else 1)  # TCPStore's and gloo's besides the post's
