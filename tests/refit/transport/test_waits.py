"""Every wait on a link ends: by a timeout, by `close`, or by the death of a process."""

import subprocess
import sys
import time

import pytest

from nemo_fp8rl.refit.transport.handshake import connect
from tests.refit.memory_engine import TRANSPORTS
from tests.refit.remote_end import RemoteEnd
from tests.refit.transport.links import (
    AT_ONCE,
    CAPACITY,
    LONG,
    PROCESS_TRANSPORTS,
    SHORT,
    TOKEN,
    fill_and_send,
    in_thread,
    raises_link_error,
)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_silence_ends_in_a_link_error_that_names_the_seconds(make_link, transport):
    sender, receiver = make_link(transport, SHORT)
    with raises_link_error("0.5 s"):
        receiver.receive()
    for _ in range(2):
        fill_and_send(sender, b"", b"x")
    with raises_link_error("0.5 s"):
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_the_sender_wakes_a_receiver_that_waits(make_link, transport):
    sender, receiver = make_link(transport)
    waiting = in_thread(receiver.receive)
    time.sleep(0.2)
    for _ in range(2):
        sender.close()
    with raises_link_error():
        waiting.result(LONG)
    with raises_link_error():
        sender.acquire_buffer()
    with raises_link_error():
        receiver.receive()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_close_wakes_both_sides_when_the_sender_waits(make_link, transport, closer):
    sender, receiver = make_link(transport)
    for _ in range(2):
        fill_and_send(sender, b"", b"x")
    waiting = in_thread(sender.acquire_buffer)
    time.sleep(0.2)
    for _ in range(2):
        (sender if closer == "sender" else receiver).close()
    with raises_link_error():
        waiting.result(LONG)
    with raises_link_error():
        sender.acquire_buffer()
    if closer == "receiver":
        with raises_link_error("closed"):
            receiver.receive()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_can_be_closed_while_it_waits(make_local_link, transport):
    sender, receiver = make_local_link(transport)
    waiting = in_thread(receiver.receive)
    time.sleep(0.2)
    receiver.close()
    with raises_link_error("closed"):
        waiting.result(LONG)
    with raises_link_error():
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_killed_sender_ends_the_receivers_wait(cleanup, transport):
    remote = RemoteEnd()
    cleanup.append(remote)
    address = remote.listen(transport, TOKEN, LONG)
    remote.start("accept", "sink", CAPACITY)
    receiver = connect(address, TOKEN, "sink", LONG)
    remote.result()
    remote.fill_and_send(b"the last", b"words" * 1000)
    header, payload = receiver.receive()
    waiting = in_thread(receiver.receive)
    time.sleep(0.2)
    remote.kill()
    with raises_link_error("gone"):
        waiting.result(LONG)
    with raises_link_error("gone"):
        receiver.receive()
    receiver.release()
    assert (header, payload.numpy().tobytes()) == (b"the last", b"words" * 1000)  # the memory outlives the sender


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_killed_receiver_ends_the_senders_wait(make_link, transport):
    sender, receiver = make_link(transport)
    for _ in range(2):
        fill_and_send(sender, b"", b"x" * CAPACITY)
    waiting = in_thread(sender.acquire_buffer)
    time.sleep(0.2)
    receiver.kill()
    with raises_link_error("gone"):
        waiting.result(LONG)
    with raises_link_error("gone"):
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_killed_receiver_is_noticed_while_a_buffer_is_free(make_link, transport):
    sender, receiver = make_link(transport)
    receiver.kill()
    with raises_link_error("gone"):
        sender.acquire_buffer()


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_process_leaves_while_its_link_waits(make_link, transport):
    """No thread of a link keeps a process alive, or crashes it."""
    sender, receiver = make_link(transport)
    fill_and_send(sender, b"", b"x")
    receiver.receive()
    receiver.leave()
    receiver.process.join(AT_ONCE)
    assert receiver.process.exitcode == 0


EXIT_SCRIPT = """
import atexit, threading
atexit.register(lambda: print(*(thread.name for thread in threading.enumerate()), sep=","))  # the last of its kind
from concurrent.futures import ThreadPoolExecutor
from nemo_fp8rl.refit.transport.handshake import GREETINGS, Listener, connect
from tests.refit.transport import fake_cuda_runtime
fake_cuda_runtime.install()
listener = Listener("{transport}", "127.0.0.1", "token", 20)
with ThreadPoolExecutor(1) as threads:
    connecting = threads.submit(connect, listener.address, "token", "sink", 20)
    sender, receiver = listener.accept("sink", 4096), connecting.result()
sender.acquire_buffer()
sender.send(b"a", 4096)
receiver.receive()
assert any(thread.name == "refit link" for thread in threading.enumerate())
"""


@pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
def test_a_process_that_ends_frees_its_buffers_first(transport):
    script = EXIT_SCRIPT.format(transport=transport)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not {"refit link", "refit nixl"} & set(done.stdout.strip().split(","))
