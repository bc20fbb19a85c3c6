"""Every number format over the wire: full versions, deltas, any split of trainer and engine, damage."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import FORMATS, NVFP4, BlockScaled, quantize_blockwise
from nemo_fp8rl.refit.manifest import TensorPart
from tests.refit.memory_engine import Message, bf16, encode_of, random_weights, split
from tests.refit.stream import NORM, UP, Stream, halve_some

EACH = pytest.mark.parametrize("name", FORMATS)
WIRE = {
    "fp8": 0.5002,
    "fp8_1x128": 0.516,
    "mxfp8": 0.501,
    "mxfp8_1x32": 0.516,
    "nvfp4": 0.253,
    "nvfp4_1x16": 0.282,
    "nvfp4_a16": 0.253,
    "nvfp4_a16_1x16": 0.282,
}


def parts(name: str, rows: int = 512, columns: int = 768) -> list[TensorPart]:
    return [TensorPart.of(UP, FORMATS[name], (rows, columns)), bf16(NORM, 100)]


@EACH
def test_a_version_has_the_bytes_of_its_format(name):
    (report,) = Stream([parts(name)], [parts(name)]).deliver(random_weights(parts(name)), 0)
    assert report.quantized_nbytes / report.quantized_bf16_nbytes <= WIRE[name]


@EACH
@pytest.mark.parametrize(("source_dim", "sink_dim"), [(0, 1), (1, 0)])
def test_resharded_versions_and_deltas_are_those_of_the_whole_tensor_quantized(name, source_dim, sink_dim):
    """A global scale belongs to the whole tensor, so that any split of it has the same bytes."""
    sources = split(parts(name), 2, source_dim, replicate=False)
    sinks = split(parts(name), 3, sink_dim, replicate=True)
    weights, stream = random_weights(parts(name)), Stream(sources, sinks, bucket=1 << 16)
    stream.deliver(weights, 0, keep=True)
    assert stream.has_weights(weights)
    for version in (1, 2):
        weights = halve_some(weights, 0.01, seed=version)
        reports = stream.deliver(weights, version, delta=True, keep=True)
        assert stream.has_weights(weights)
        assert sum(r.nbytes for r in reports) < 0.3 * sum(r.bf16_nbytes for r in reports) * WIRE[name]


@EACH
@pytest.mark.parametrize("is_quantized", [False, True], ids=["bf16", "quantized"])
def test_a_stack_of_matrices_arrives_as_the_matrix_below_one_another(name, is_quantized):
    weights, stream = random_weights(parts(name)), Stream([parts(name)], [parts(name)])

    def values_of(values: dict[str, Tensor], part: TensorPart) -> Tensor | BlockScaled:
        matrix = values[part.name]
        if part.format is None:
            return matrix
        if not is_quantized:
            return matrix.view(4, 128, -1)
        whole = quantize_blockwise(matrix, format=part.format, scale_format=stream.fmt, encode=encode_of(values, UP))
        scales = whole.scale_inv.view(4, -1, whole.scale_inv.size(-1))
        return replace(whole, data=whole.data.view(4, 128, -1), scale_inv=scales)

    stream.rank_values = values_of
    stream.deliver(weights, 0, keep=True)
    assert stream.has_weights(weights)
    weights = halve_some(weights, 0.01)
    stream.deliver(weights, 1, delta=True, keep=True)
    assert stream.has_weights(weights)


@EACH
@pytest.mark.parametrize("place", ["first scale", "last scale", "data"])
def test_a_damaged_byte_is_found_and_the_tensor_named(name, place):
    (part,) = matrix = parts(name)[:1]
    at = {"first scale": 0, "last scale": part.scale_bytes - 1, "data": part.scale_bytes + 7}[place]

    def damage(k: int, message: Message) -> list[Message]:
        header, payload = message
        payload = payload.clone()
        payload[at] ^= 1
        return [(header, payload)]

    assert UP in Stream([matrix], [matrix], change=damage).refusal(random_weights(matrix), 0)


@EACH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_not_sent(name, bad):
    weights = random_weights(parts(name))
    weights[UP][300, 500] = bad
    sent, _ = Stream([parts(name)], [parts(name)]).run(weights, 0)
    assert "training diverged" in str(sent[0])


def test_values_of_one_byte_belong_to_one_row():
    with pytest.raises(ValueError, match="packs two values into a byte, and a row has 3 values"):
        _ = TensorPart.of(UP, NVFP4, (16, 3)).nbytes
