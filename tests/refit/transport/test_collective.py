"""Collective links: the two ends of a process group find each other, or give up."""

import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from nemo_fp8rl.refit.transport import collective
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.handshake import Listener, connect
from nemo_fp8rl.refit.transport.link import LinkError
from tests.refit.transport.links import AT_ONCE, CAPACITY, LONG, SHORT, TOKEN, in_thread, raises_link_error, wait_until

WAIT_AND_EXIT_SCRIPT = """
import contextlib, socket, sys, threading, time
from nemo_fp8rl.refit.transport import collective
from nemo_fp8rl.refit.transport.control import Control

class SlowToEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # while modules are removed; by then the wait is over

def offer(control):
    with contextlib.suppress(collective.LinkError):
        collective.offer(control, 100, store, store.port)

def start(thread, start=threading.Thread.start):
    if thread.name == "refit group":
        events["starting"].set()
        time.sleep(0.5)
    start(thread)
    if thread.name == "refit group":
        events["waiting"].set()

events = {"starting": threading.Event(), "waiting": threading.Event()}
threading.Thread.start = start
listener = socket.create_server(("127.0.0.1", 0))
caller = socket.create_connection(listener.getsockname())
source, peer = Control(caller, 1.0, "sink"), Control(listener.accept()[0], 1.0, "source")
store = collective.listen("127.0.0.1", 1.0)
slow = SlowToEnd()
threading.Thread(target=offer, args=(source,), daemon=True).start()
peer.receive_fields(port=int, prefix=str)
events[sys.argv[1]].wait()
print("leaves", flush=True)
"""


@pytest.mark.parametrize("when", ["starting", "waiting"])
def test_a_process_may_end_while_it_waits_for_a_group(when):
    done = subprocess.run(
        [sys.executable, "-c", WAIT_AND_EXIT_SCRIPT, when], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")


def is_building_group() -> bool:
    return any(thread.name == "refit group" for thread in threading.enumerate())


@pytest.mark.parametrize("waits", ["source", "sink"])
def test_a_wait_for_an_end_that_is_gone_ends_at_once(waits, cleanup):
    listener = socket.create_server(("127.0.0.1", 0))
    cleanup.append(listener)
    control = Control(socket.create_connection(listener.getsockname()), LONG, "the peer")
    peer = Control(listener.accept()[0], LONG, "this side")
    nowhere = socket.create_server(("127.0.0.1", 0))
    port = nowhere.getsockname()[1]
    nowhere.close()  # the port of a source that is gone
    if waits == "source":
        store = collective.listen("127.0.0.1", LONG)
        result = in_thread(collective.offer, control, CAPACITY, store, store.port)
        peer.receive_fields(port=int, prefix=str)
    else:
        result = in_thread(collective.take, control, CAPACITY)
        peer.send_fields(port=port, prefix="x")
    wait_until(is_building_group)
    peer.close()
    with raises_link_error("the peer is gone"):
        result.result(AT_ONCE)
    wait_until(lambda: not is_building_group())


def test_a_payload_that_never_comes_ends_the_wait(make_local_link):
    sender, receiver = make_local_link("collective", SHORT)
    sender._control.send(struct.pack("<cQ", b"M", 100) + b"header")
    time.sleep(SHORT + 0.3)
    with raises_link_error(r"0\.5 s"):
        receiver.receive()


def test_a_link_without_memory_fails_on_both_sides_at_once(cleanup):
    listener = Listener("collective", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    for call in (lambda: listener.accept("sink", 2**50), lambda: connecting.result(AT_ONCE)):
        with pytest.raises(LinkError, match=r"set a smaller nemo_fp8rl\.refit\.bucket_bytes"):
            call()
