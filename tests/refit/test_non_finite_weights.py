"""A weight that is not finite is named on both sides and not sent."""

import math
import re

import pytest
import torch

from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.memory_engine import (
    fp8,
    random_weights,
)
from tests.refit.stream import NORM, PARTS, SCALE, UP, Stream


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [UP, NORM, SCALE])
@pytest.mark.parametrize("delta", [False, True])
def test_a_weight_that_is_not_finite_is_named_on_both_sides(name, bad, delta):
    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS] * 2)
    stream.deliver(weights, 6, keep=True)
    weights[name].view(-1)[-1] = bad
    sent, loaded = stream.run(weights, 7, delta=delta, keep=True)
    for answer in (*sent, *loaded):
        assert isinstance(answer, RefitError)
        assert re.search(rf"refit 7: .*{re.escape(name)}\b.* not finite.*; training diverged", str(answer))
    assert stream.senders[0].base_version == -1


@pytest.mark.parametrize(("row", "code"), [(0, 0x7F), (299, 0xFF)])
@pytest.mark.parametrize("delta", [False, True])
def test_fp8_values_that_are_nan_are_named(row, code, delta):
    part = fp8(UP, 300, 200)
    values = quantize_blockwise(random_weights([part])[UP])
    sender, (sending, _) = WeightSender([part], "pow2"), in_process_link(1 << 20, 20.0)
    if delta:
        sender.send([(UP, values)], 0, {(0, 0): Link(in_process_link(1 << 20, 20.0)[0], (part,))}, keep=True)
    values.data.view(torch.uint8)[row, 7] = code
    with pytest.raises(RefitError, match=rf"refit 1: {re.escape(UP)}: 1 of 60000 FP8 values.* are NaN; training div"):
        sender.send([(UP, values)], 1, {(0, 0): Link(sending, (part,))}, delta=delta, keep=True)


def test_a_value_that_overflows_the_engines_dtype_is_refused():
    weights, parts = {NORM: torch.full((100,), 1e38)}, [TensorPart.of(NORM, torch.float16, (100,))]
    (answer,), _ = Stream([parts], [parts]).run(weights, 0)
    assert isinstance(answer, RefitError)
    assert NORM in str(answer)
