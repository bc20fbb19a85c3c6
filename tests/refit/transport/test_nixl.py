"""NIXL links: what they keep, and what happens without NIXL."""

import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from nemo_fp8rl.refit.transport import nixl
from tests.refit.memory_engine import TRANSPORTS
from tests.refit.transport.links import CAPACITY, LONG, fill_and_send, wait_until

needs_nixl = pytest.mark.skipif("nixl" not in TRANSPORTS, reason="nixl is not installed: make test-nixl")


def test_a_missing_nixl_package_is_named(check_refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    monkeypatch.setattr(nixl, "_agents", {})
    hint = r"pip install 'nemo-fp8rl\[nixl\]'.*set nemo_fp8rl\.refit\.transport=auto"
    check_refused("nixl", hint, hint)


@needs_nixl
def test_a_gpu_without_room_for_nixl_is_a_hint_on_both_sides(check_refused, monkeypatch, cuda_runtime):
    monkeypatch.setattr(cuda_runtime, "capacity", 1000)
    hint = r"0\.1 MiB .*out of memory.*transport=auto, or a smaller nemo_fp8rl\.refit\.bucket_bytes"
    check_refused("nixl", hint, hint)


@needs_nixl
@pytest.mark.parametrize("closer", ["sender", "receiver", "connection", "nobody"])
def test_nixl_keeps_nothing_of_a_link_that_ended(make_local_link, cleanup, monkeypatch, cuda_runtime, closer):
    monkeypatch.setattr(nixl, "GRACE", 0.1)
    other, _ = make_local_link("nixl")  # stays open
    sender, receiver = make_local_link("nixl")
    source, sink = sender._agent, receiver._registered.agent
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY
    remote, links = receiver._remote, sink._remotes[receiver._remote]
    buckets = {sender._buffers.address, receiver._buffers.address}  # as on a GPU, not from torch's allocator
    assert buckets <= cuda_runtime.allocations.keys()
    if closer != "nobody":
        {"sender": sender, "receiver": receiver, "connection": sender._control}[closer].close()
    cleanup[:] = [thing for thing in cleanup if thing is not sender and thing is not receiver]
    del sender, receiver
    wait_until(lambda: not buckets & cuda_runtime.allocations.keys() and sink._remotes[remote] < links)
    assert source._thread is not None
    other.acquire_buffer()


@needs_nixl
def test_a_sink_that_gives_up_releases_its_transfer_at_its_end(make_local_link, monkeypatch):
    sender, receiver = make_local_link("nixl", LONG)
    agent, states = receiver._registered.agent, ["PROC"]
    monkeypatch.setattr(agent._nixl, "check_xfer_state", lambda handle: states[0])
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    wait_until(lambda: receiver._transfer is not None)
    receiver.close()
    time.sleep(0.3)
    assert receiver._transfer is not None and agent._remotes[receiver._remote] >= 1
    before, states[0] = agent._remotes[receiver._remote], "DONE"
    wait_until(lambda: receiver._transfer is None and agent._remotes[receiver._remote] < before)
    assert not nixl._stuck_receivers


@needs_nixl
@pytest.mark.parametrize("closer", ["source", "sink"])
def test_a_process_that_ends_right_after_a_link_is_not_aborted(closer):
    """Ten at once: Python would end threads that are within NIXL in a way that aborts the process."""
    script = """
import sys, threading
from nemo_fp8rl.refit.transport.handshake import GREETINGS, Listener, connect
listener = Listener("nixl", "127.0.0.1", "token", 20.0)
ends = {}
taking = threading.Thread(target=lambda: ends.update(sink=connect(listener.address, "token", "sink", 20.0)))
taking.start()
ends["source"] = listener.accept("sink", 1 << 20)
taking.join()
for _ in range(20):
    ends["source"].acquire_buffer()
    ends["source"].send(b"", 1 << 20)
    ends["sink"].receive()
    ends["sink"].release()
ends[sys.argv[1]].close()
"""
    command = [sys.executable, "-c", script, closer]
    with ExitStack() as stack:
        leaving = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(10)]
        for process in leaving:
            stack.callback(process.kill)
        for process in leaving:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-2000:]
