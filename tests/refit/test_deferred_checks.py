"""Checks as on a GPU: the numbers of a message are read once, at its end."""

import math
import re

import pytest
import torch

from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.message import Header
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.fake_gpu_reads import ScalarReads, fake_gpu_reads
from tests.refit.memory_engine import (
    Message,
    bf16,
    fp8,
    random_weights,
)
from tests.refit.stream import (
    EACH_FORMAT,
    FAULTS,
    FAULTY,
    FROM_BF16_OR_FP8,
    NORM,
    PARTS,
    SCALE,
    UP,
    Stream,
    faulty_stream,
    flip_bit,
    halve_some,
)


@pytest.fixture
def fake_gpu(monkeypatch):
    fake_gpu_reads(monkeypatch)


@pytest.mark.usefixtures("fake_gpu")
@FROM_BF16_OR_FP8
def test_numbers_of_a_gpu_are_read_once_a_message(from_fp8):
    def count_reads(experts: int) -> tuple[int, int]:
        parts = [fp8(f"experts.{i}.weight", 128, 256) for i in range(experts)]
        parts += [bf16(f"norms.{i}.weight", 64) for i in range(experts)]
        stream, weights = Stream([parts], [parts], from_fp8=from_fp8), random_weights(parts)
        values = [(part.name, stream.rank_values(weights, part)) for part in parts]
        with ScalarReads() as sending:
            stream.senders[0].send(values, 0, stream.links[0])
        with ScalarReads() as receiving:
            stream.engine.ranks[0].load(0, True, True, lambda: None)
        assert stream.has_weights(weights)
        assert stream.tampered[0].seen == 1
        return sending.count, receiving.count

    assert count_reads(2) == count_reads(10)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("delta", [False, True])
@EACH_FORMAT
def test_on_a_gpu_every_kind_of_tensor_arrives_to_the_bit(fmt, delta):
    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS] * 2, fmt=fmt, bucket=20_000)
    stream.deliver(weights, 0, keep=True)
    weights = halve_some(weights, 0.01)
    stream.deliver(weights, 1, delta=delta, keep=True)
    assert stream.has_weights(weights, fmt)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("fault", FAULTS)
def test_on_a_gpu_a_damaged_message_is_found_and_named(fault):
    change, message = FAULTS[fault]
    error = faulty_stream(change).refusal(random_weights(FAULTY), 7)
    assert re.search(message, error), error


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("seed", range(6))
def test_on_a_gpu_a_flipped_bit_is_found_before_the_release(seed):
    stream = faulty_stream(flip_bit(seed))
    released, release = [], stream.tampered[0].release
    stream.tampered[0].release = lambda: (released.append(True), release())
    error = stream.refusal(random_weights(FAULTY), 7)
    assert any(part.name in error for part in FAULTY), error
    assert len(released) == seed % 3


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [UP, NORM, SCALE])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("bucket", [20_000, 1 << 21])
def test_on_a_gpu_a_weight_that_is_not_finite_is_not_sent(name, bad, delta, bucket):
    """Although it is in a bucket of each link at the moment at which the check ends."""
    arrived: list[str] = []

    def record_names(at: int, message: Message) -> list[Message]:
        entries = Header.decode(message[0]).entries
        arrived.extend(route[entry.piece].name for entry in entries)
        return [message]

    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS] * 2, bucket=bucket)
    route = stream.links[0][0, 0].route
    stream.deliver(weights, 6, keep=True)
    weights[name].view(-1)[-1] = bad
    for tampered in stream.tampered:
        tampered.change = record_names
    sent, loaded = stream.run(weights, 7, delta=delta, keep=True)
    for answer in (*sent, *loaded):
        assert isinstance(answer, RefitError)
        assert re.search(rf"refit 7: .*{re.escape(name)}\b.* not finite.*; training diverged", str(answer))
    pieces = sum(part.name == name for part in route)
    assert arrived.count(name) < 2 * pieces
    assert pieces > 1 or name not in arrived
    assert stream.senders[0].base_version == -1


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("scale", [False, True], ids=["value", "scale"])
def test_on_a_gpu_fp8_values_that_are_nan_are_named(scale):
    part = fp8(UP, 300, 200)
    values = quantize_blockwise(random_weights([part])[UP])
    sender, (sending, _) = WeightSender([part], "pow2"), in_process_link(1 << 20, 20.0)
    if scale:
        values.scale_inv[2, 1] = math.nan
    else:
        values.data.view(torch.uint8)[299, 7] = 0xFF
    found = "are not finite" if scale else "1 FP8 values are NaN"
    where = rf"values from \[0, 0\] to \[299, 199\].*{found}; training div"
    with pytest.raises(RefitError, match=rf"refit 1: {re.escape(UP)}: {where}"):
        sender.send([(UP, values)], 1, {(0, 0): Link(sending, (part,))})
