"""Weights on a real GPU: its buckets and digests, and memory that one process has and another one maps."""

import time

import pytest
import torch

from nemo_fp8rl.fp8.kernels.tile_delta import TileDelta, kernels_for
from nemo_fp8rl.fp8.kernels.tile_format import TILE, body_capacity, body_start
from nemo_fp8rl.refit.digest import digest_of, has_digest, sum_contents, sum_words, word_sum_digest
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.transport.handshake import Listener
from nemo_fp8rl.refit.transport.link import GRACE, HOST, LinkError, finish_gpu_work
from tests.fp8.test_tile_delta import versions
from tests.refit.memory_engine import TRANSPORTS
from tests.refit.remote_end import RemoteEnd
from tests.refit.test_bridge import Run
from tests.refit.test_gpu_kernels import layouts
from tests.refit.transport.links import CAPACITY, LONG, TOKEN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture
def remote():
    """Another process, with the same GPU."""
    process = RemoteEnd(gpu=True)
    yield process
    process.kill()


@pytest.fixture
def listener():
    listener = Listener("cuda_ipc", "127.0.0.1", TOKEN, LONG, GPU)
    yield listener
    listener.close()


def test_another_process_reads_what_this_one_wrote(listener, remote):
    remote.start("connect", listener.address, TOKEN, "sink", LONG, GPU)
    sender = listener.accept("sink", CAPACITY)
    remote.result()
    for seed, size in enumerate([0, 1, 4097, CAPACITY, CAPACITY, 7]):
        content = torch.randint(
            256, (size,), dtype=torch.uint8, device=GPU, generator=torch.Generator(GPU).manual_seed(seed)
        )
        bucket = sender.acquire_buffer()
        assert bucket.device == GPU
        bucket[:size] = content
        finish_gpu_work(bucket)
        sender.send(b"header", size)
        assert remote.receive() == (b"header", content.cpu().numpy().tobytes())
        remote.release()
    sender.close()


def test_memory_comes_back_from_a_process_that_was_killed(listener, remote):
    nbytes = 1 << 28
    torch.zeros(1, device=GPU)
    before = torch.cuda.mem_get_info(GPU)[0]
    remote.start("connect", listener.address, TOKEN, "sink", LONG, GPU)
    sender = listener.accept("sink", nbytes)
    remote.result()
    assert torch.cuda.mem_get_info(GPU)[0] < before - 2 * nbytes
    remote.kill()
    sender.close()
    del sender
    deadline = time.monotonic() + GRACE + 10
    while torch.cuda.mem_get_info(GPU)[0] < before - nbytes and time.monotonic() < deadline:
        time.sleep(0.1)
    assert torch.cuda.mem_get_info(GPU)[0] > before - nbytes


def test_places_in_another_process_are_written_until_it_is_killed(listener, remote):
    nbytes, before = 1 << 28, torch.cuda.mem_get_info(GPU)[0]
    part = TensorPart.of("weight", torch.uint8, (nbytes,))
    remote.start("connect", listener.address, TOKEN, "sink", LONG, GPU)
    sender = listener.accept("sink", CAPACITY)
    remote.result()
    for version in range(2):
        remote.start("open_places", version, nbytes, "cuda")
        places = sender.wait_for_places(version)
        remote.result()
        values = torch.randint(256, (nbytes,), dtype=torch.uint8, device=GPU)
        place = places.find(part).data
        assert place.device == GPU
        place.copy_(values)
        finish_gpu_work(place)
        assert remote.read_tensor() == values.cpu().numpy().tobytes()
    del values
    torch.cuda.empty_cache()
    remote.kill()
    place.zero_()  # as of a rank that has not noticed
    finish_gpu_work(place)
    with pytest.raises(LinkError):
        sender.acquire_buffer()
    sender.close()
    del place, places
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info(GPU)[0] < before - nbytes // 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert torch.cuda.mem_get_info(GPU)[0] >= before - nbytes // 2


def test_memory_that_cuda_does_not_share_is_not_offered(listener, remote):
    """That of torch's growing segments is of CUDA's virtual memory management, as that of vLLM's sleep mode."""
    remote.start("connect", listener.address, TOKEN, "sink", LONG, GPU)
    sender = listener.accept("sink", CAPACITY)
    remote.result()
    remote.use_growing_segments()
    remote.start("open_places", 0, 1 << 24, "cuda")
    places = sender.wait_for_places(0)
    remote.result()
    assert places is None or places.find(TensorPart.of("weight", torch.uint8, (1 << 24,))) is None


def test_digests_are_those_of_the_host():
    values = torch.randn(1000, 333)
    assert digest_of(values.to(GPU)) == word_sum_digest(values) != digest_of(values)
    assert has_digest(word_sum_digest(values), values.to(GPU))
    assert has_digest(digest_of(values), values.to(GPU))


def test_digests_of_every_layout_are_those_of_the_formula():
    contents = [tuple(tensor.to(GPU) for tensor in tensors) for tensors in layouts()]
    (whole,) = contents[0]
    bands = whole[:, 20:50, 4:40]  # `to` makes every tensor contiguous and aligned
    parts = [bands, bands.transpose(0, 2), whole.view(-1)[1:], whole.view(-1)[4:1001]]
    sums = sum_contents([*contents, *((part,) for part in parts)]).tolist()
    expected = [*layouts(), *((part.cpu(),) for part in parts)]
    assert sums == [int(sum_words(*tensors)) for tensors in expected]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_delta_that_it_packs_is_read_by_both_devices(shift):
    """The tiles are in any order, so no specification has these very bytes."""
    old, new = (version.to(GPU)[shift:] for version in versions(20 * TILE + 776 + shift, 0.01))
    message = torch.empty(body_start(len(old)) + body_capacity(len(old)), dtype=torch.uint8, device=GPU)
    used = torch.zeros(1, dtype=torch.int32, device=GPU)
    kernels = kernels_for(old)
    assert kernels is not None
    kernels.pack(old, new, message, used)
    message = message[: body_start(len(old)) + int(used)]
    for place in (GPU, HOST):
        data = old.to(place).clone()
        delta = TileDelta.decode(message, len(old))
        assert delta.verdict is not None
        assert int(delta.verdict) == 0
        delta.apply_(data)
        assert torch.equal(data.cpu(), new.cpu())
    rows = torch.zeros(4, len(old) // 4 + 9, dtype=torch.uint8, device=GPU)[:, 3 : 3 + len(old) // 4]
    rows.copy_(old.view(4, -1))
    TileDelta.decode(message.cpu(), len(old)).apply_(rows)
    assert torch.equal(rows.reshape(-1), new)
    message[0] += 1
    damaged = TileDelta.decode(message, len(old))
    damaged.apply_(rows)
    assert int(damaged.verdict) != 0
    assert torch.equal(rows.reshape(-1), new)


def test_the_sender_waits_for_the_trainers_stream():
    """A thread with a stream of its own sends the weights."""
    run = Run(transport="in_process", device=GPU)
    try:
        for _ in range(2):
            with torch.cuda.stream(torch.cuda.Stream(GPU)):
                torch.cuda._sleep(1_000_000_000)  # cycles: half a second or more
                for weight in run.trainer.weights.values():
                    weight.neg_()
                run.bridge.refit()
            torch.cuda.synchronize(GPU)
            assert run.holds()
    finally:
        run.trainer.close()


@pytest.mark.parametrize("to", [GPU, HOST], ids=["GPU", "host"])
@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("transport", [transport for transport in TRANSPORTS if transport != "cuda_ipc"])
def test_weights_on_a_gpu_reach_engines_by_every_transport(transport, mode, to):
    run = Run(transport=transport, mode=mode, device=GPU, to=to)
    try:
        for _ in range(3):
            assert run.bridge.refit().retries == 0
            assert run.holds()
            run.step()
    finally:
        run.trainer.close()
