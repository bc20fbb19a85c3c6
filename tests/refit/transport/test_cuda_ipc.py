"""Links through mapped GPU memory, with a fake of CUDA's runtime."""

import gc
import sys
import time

import pytest
import torch

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport import cuda_ipc, cuda_memory
from nemo_fp8rl.refit.transport.handshake import Listener, connect
from tests.refit.transport import fake_cuda_runtime
from tests.refit.transport.links import (
    CAPACITY,
    LONG,
    TOKEN,
    control_pair,
    fill_and_send,
    in_thread,
    link_files,
    wait_until,
)


def test_a_gpu_without_room_is_a_hint_on_both_sides(check_refused, monkeypatch, cuda_runtime):
    monkeypatch.setattr(cuda_runtime, "capacity", 1000)
    hint = r"0\.1 MiB .*out of memory.*transport=shared_memory.*refit\.bucket_bytes"
    check_refused("cuda_ipc", hint, hint)


@pytest.fixture
def unmappable_memory(monkeypatch, cuda_runtime) -> None:
    """The sink cannot map memory, as between GPUs that do not reach each other's."""
    failed = cuda_runtime.cudaError_t.cudaErrorMapBufferObjectFailed
    monkeypatch.setattr(cuda_runtime, "cudaIpcOpenMemHandle", lambda handle, flags: (failed, None))


def test_unmappable_memory_is_a_hint_on_both_sides(check_refused, unmappable_memory):
    hint = r"sink cannot map .*on cpu: mapping of buffer.*transport=shared_memory, or collective where .* several"
    check_refused("cuda_ipc", hint, hint)


def test_nearest_is_shared_memory_if_a_gpus_cannot_be_mapped(
    cleanup, unmappable_memory, monkeypatch, caplog, cuda_runtime
):
    collector = cuda_memory.Collector("test free", 0.0)  # has no earlier calls to wait for
    monkeypatch.setattr(cuda_ipc, "FREE_AFTER_GRACE", collector)
    listener, before = Listener("nearest", "127.0.0.1", TOKEN, LONG), set(cuda_runtime.allocations)
    monkeypatch.setattr(listener, "_choose_transport", lambda domain: "cuda_ipc")  # as if weights were on a GPU
    cleanup.append(listener)
    files = set(link_files())
    connecting = in_thread(connect, listener.address, TOKEN, "sink", LONG)
    sender, receiver = listener.accept("sink", CAPACITY), connecting.result(LONG)
    cleanup.extend([sender, receiver])
    assert len(set(link_files()) - files) == 1  # the file that both ends map
    wait_until(lambda: set(cuda_runtime.allocations) <= before)
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY
    (record,) = [record for record in caplog.records if record.name == Listener.__module__]
    assert record.getMessage() == (
        "sink cannot map this rank's GPU memory (on cpu: mapping of buffer object failed): "
        "its weights go through the host's shared memory"
    )


def test_weights_that_are_not_on_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(cuda_memory, "DEVICE_TYPE", "cuda")
    with control_pair(LONG) as (source, sink):
        with pytest.raises(RefitError, match=r"weights are on the cpu.*transport=shared_memory"):
            cuda_ipc.offer(source, CAPACITY, torch.device("cpu"))
        source.send_fields(handle=bytes(64).hex())
        assert cuda_ipc.take(sink, CAPACITY, torch.device("cpu")) is None
        assert source.receive_fields(mapped=bool, why=str) == {"mapped": False, "why": "on cpu: weights are on the cpu"}


def test_a_missing_cuda_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, fake_cuda_runtime.NAME, None)
    missing = pytest.raises(RefitError, match=r"pip install cuda-bindings.*transport=shared_memory")
    with control_pair(LONG) as (source, _), missing:
        cuda_ipc.offer(source, CAPACITY, torch.device("cpu"))


def test_the_sink_frees_memory_at_once_and_the_source_later(make_local_link, cleanup, cuda_runtime, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "FREE_AFTER_GRACE", cuda_memory.Collector("test free", 1.0))
    sender, receiver = make_local_link("cuda_ipc")
    source_address, sink_address = sender._buffers.address, receiver._buffers.address
    assert source_address in cuda_runtime.allocations and sink_address in cuda_runtime.mappings
    fill_and_send(sender, b"a", b"A" * CAPACITY)
    assert receiver.receive()[1].numpy().tobytes() == b"A" * CAPACITY
    sender.close()
    receiver.close()
    cleanup.clear()
    gc.disable()  # memory is freed without the collector
    try:
        del receiver
        wait_until(lambda: sink_address not in cuda_runtime.mappings)
        start = time.monotonic()
        del sender
        wait_until(lambda: source_address not in cuda_runtime.allocations)
        assert time.monotonic() - start >= 1.0
    finally:
        gc.enable()
