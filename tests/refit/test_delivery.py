"""Every tensor arrives to the bit, also resharded, and a GPU's work is waited for."""

from typing import Any

import pytest
import torch

from nemo_fp8rl.refit.receiver import piece_receiver
from nemo_fp8rl.refit.sender import bucket_writer
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from tests.refit.memory_engine import (
    random_weights,
    split,
)
from tests.refit.stream import EACH_FORMAT, FROM_BF16_OR_FP8, PARTS, Stream


@EACH_FORMAT
@FROM_BF16_OR_FP8
@pytest.mark.parametrize("bucket", [1, 20_000, 1 << 20])
def test_every_kind_of_tensor_arrives_to_the_bit(fmt, from_fp8, bucket):
    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS], fmt=fmt, bucket=bucket, from_fp8=from_fp8)
    (report,) = stream.deliver(weights, 0)
    assert stream.has_weights(weights, fmt)
    assert (report.nbytes, report.failed) == (sum(piece.nbytes for piece in stream.links[0][0, 0].route), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_any_dtype_arrive_in_that_of_the_engine(dtype):
    weights = {name: weight.to(dtype) for name, weight in random_weights(PARTS).items()}
    stream = Stream([PARTS], [PARTS])
    stream.deliver(weights, 0)
    assert stream.has_weights(weights)


@EACH_FORMAT
@FROM_BF16_OR_FP8
@pytest.mark.parametrize("bucket", [5_000, 1 << 20])
@pytest.mark.parametrize(("m", "source_dim"), [(1, 0), (2, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize(("n", "sink_dim"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_resharded_bytes_are_those_of_the_whole_tensor_quantized(fmt, from_fp8, bucket, m, source_dim, n, sink_dim):
    sources, sinks = split(PARTS, m, source_dim, replicate=False), split(PARTS, n, sink_dim, replicate=True)
    stream, weights = Stream(sources, sinks, fmt=fmt, bucket=bucket, from_fp8=from_fp8), random_weights(PARTS)
    stream.deliver(weights, 0)
    assert stream.has_weights(weights, fmt)


def test_a_piece_for_several_ranks_is_quantized_once(monkeypatch):
    shapes = []
    original = WeightSender._quantize
    monkeypatch.setattr(WeightSender, "_quantize", lambda *args: (shapes.append(args[3].shape), original(*args)))
    stream, weights = Stream([PARTS], [PARTS] * 3), random_weights(PARTS)
    (report,) = stream.deliver(weights, 0)
    assert len(shapes) == len([part for part in PARTS if all(part.shape)])
    assert report.nbytes == 3 * sum(part.nbytes for part in PARTS)
    assert stream.has_weights(weights)


def test_a_version_follows_another_over_the_same_links():
    stream = Stream(split(PARTS, 2, 0, replicate=False), split(PARTS, 2, 1, replicate=True), bucket=10_000)
    for version in range(4):
        weights = random_weights(PARTS, seed=version)
        stream.deliver(weights, version)
        assert stream.has_weights(weights)


def test_weights_may_come_in_any_order_and_with_any_strides():
    weights = random_weights(PARTS)
    strided = {name: w.t().contiguous().t() if w.dim() == 2 else w for name, w in reversed(weights.items())}
    stream = Stream([PARTS[::-1]], [PARTS])
    stream.deliver(strided, 0)
    assert stream.has_weights(weights)


@pytest.mark.parametrize(
    ("module", "name"), [(bucket_writer, "send"), (piece_receiver, "release")], ids=["sender", "receiver"]
)
def test_a_gpus_work_ends_before_a_bucket_changes_hands(monkeypatch, module, name):
    """Links know nothing of streams: `finish_gpu_work` waits for the work that is queued on one."""
    weights, stream, events = random_weights(PARTS), Stream([PARTS], [PARTS], bucket=20_000), []
    end: Any = stream.links[0][0, 0].end if name == "send" else stream.tampered[0]
    hand_over = getattr(end, name)

    def record_hand_over(*args: Any) -> None:
        events.append(name)
        hand_over(*args)

    monkeypatch.setattr(module, "finish_gpu_work", lambda bucket: events.append("finish_gpu_work"))
    monkeypatch.setattr(end, name, record_hand_over)
    stream.deliver(weights, 0)
    assert len(events) > 4
    assert events == ["finish_gpu_work", name] * (len(events) // 2)
