"""The matrices of experts travel as stacks, from any layout to any other, and arrive as single ones would."""

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import FORMATS, quantize_blockwise
from nemo_fp8rl.refit.expert_stacks import expert_name, stack_of, stack_parts, stack_weights
from nemo_fp8rl.refit.manifest import RefitError, Sources, TensorPart
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.memory_engine import encode_of
from tests.refit.stream import FROM_BF16_OR_FP8, Stream

EXPERTS, ROWS, COLUMNS = 8, 256, 128
LAYER = "model.layers.0.mlp.experts"
GATE, DOWN = f"{LAYER}.gate_proj.weight", f"{LAYER}.down_proj.weight"


def expert_parts(format: str, experts: range) -> list[TensorPart]:
    dtype = FORMATS.get(format) or getattr(torch, format)
    names = [f"{LAYER}.{expert}.{x}_proj.weight" for expert in experts for x in ("gate", "down")]
    return [TensorPart.of(name, dtype, (ROWS, COLUMNS) if "gate" in name else (COLUMNS, ROWS)) for name in names]


def by_experts(format: str, ranks: int) -> list[list[TensorPart]]:
    borders = [EXPERTS * rank // ranks for rank in range(ranks + 1)]
    return [stack_parts(expert_parts(format, range(*pair)), EXPERTS) for pair in pairwise(borders)]


def by_rows(format: str, ranks: int) -> list[list[TensorPart]]:
    """Each matrix split, as without expert parallelism: rows of gate, columns of down."""
    (whole,) = by_experts(format, 1)

    def part(part: TensorPart, rank: int) -> TensorPart:
        region, dim = list(part.region), 1 if "gate" in part.name else 2
        region[dim] = (part.shape[dim] * rank // ranks, part.shape[dim] * (rank + 1) // ranks)
        return part.cut(tuple(region))

    return [[part(each, rank) for each in whole] for rank in range(ranks)]


def stack_values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {GATE: (EXPERTS, ROWS, COLUMNS), DOWN: (EXPERTS, COLUMNS, ROWS)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def test_names_lead_to_the_stack_and_back():
    assert stack_of(f"{LAYER}.12.gate_proj.weight") == (GATE, 12)
    assert expert_name(GATE, 12) == f"{LAYER}.12.gate_proj.weight"
    for other in ("model.layers.0.mlp.gate_proj.weight", f"{LAYER}.1.gate_proj.lora_A.weight", GATE):
        assert stack_of(other) is None


def test_other_tensors_keep_their_places():
    norm = TensorPart.of("norm.weight", torch.bfloat16, (4,))
    parts = stack_parts([norm, *expert_parts("fp8", range(2, 4)), norm], EXPERTS)
    assert [part.name for part in parts] == ["norm.weight", GATE, DOWN, "norm.weight"]
    assert parts[1].shape == (EXPERTS, ROWS, COLUMNS)
    assert parts[1].region == ((2, 4), (0, ROWS), (0, COLUMNS))
    assert parts[1].nbytes == sum(part.nbytes for part in expert_parts("fp8", range(2, 4)) if "gate" in part.name)


@pytest.mark.parametrize("experts", [(0, 2), (1, 0)])
def test_experts_that_are_no_neighbours_are_refused(experts):
    parts = [part for expert in experts for part in expert_parts("fp8", range(expert, expert + 1))]
    with pytest.raises(RefitError, match=f"{GATE}.*no neighbours"):
        stack_parts(parts, EXPERTS)


def test_weights_are_stacked_as_soon_as_they_are_complete():
    pairs = [("norm", 0), (f"{LAYER}.4.gate_proj.weight", 1), (f"{LAYER}.4.down_proj.weight", 2)]
    pairs += [(f"{LAYER}.5.gate_proj.weight", 3), (f"{LAYER}.5.down_proj.weight", 4), ("head", 5)]
    stacked = list(stack_weights(pairs, {GATE: 2, DOWN: 2}))  # type: ignore[arg-type]
    assert stacked == [("norm", 0), (GATE, [1, 3]), (DOWN, [2, 4]), ("head", 5)]


def test_a_piece_has_many_experts_and_no_more_bytes_than_allowed():
    sources, stored = Sources(by_experts("fp8", 2)), by_experts("fp8", 1)
    of_expert = ROWS * COLUMNS + 8
    for limit, gates, downs in ((4 * of_expert, 2, 2), (2 * of_expert, 4, 4), (of_expert // 2, 16, 8)):
        routes = sources.routes(stored, limit)
        found = [piece for row in routes for route in row for piece in route]
        assert [sum(piece.name == name for piece in found) for name in (GATE, DOWN)] == [gates, downs]
        cuttable = [piece for piece in found if piece.name == GATE]  # a matrix of down has one row of blocks
        assert max(piece.nbytes for piece in cuttable) <= limit


@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4", "bfloat16"])
@pytest.mark.parametrize("sources", [by_experts, by_rows])
@pytest.mark.parametrize("sinks", [by_experts, by_rows])
@FROM_BF16_OR_FP8
def test_stacks_arrive_as_single_matrices_would(format, sources, sinks, from_fp8):
    weights = stack_values()
    stream = Stream(sources(format, 2), sinks(format, 2), bucket=60_000, from_fp8=from_fp8)
    stream.deliver(weights, 0, keep=True)
    check(stream, weights, format)
    changed = stack_values(1)
    weights = {name: torch.where(changed[name] > 3, x * 1.5, x) for name, x in weights.items()}
    reports = stream.deliver(weights, 1, delta=True)
    check(stream, weights, format)
    whole = sum(part.nbytes for parts in stream.sources for part in parts)
    assert sum(report.nbytes for report in reports) < whole // 2


def check(stream: Stream, weights: dict[str, Tensor], format: str) -> None:
    """The engine has of each expert what the quantizer makes of it alone."""
    memory = stream.engine.memory()
    for stack, stacked in weights.items():
        for expert, matrix in enumerate(stacked):
            content = memory[stack]
            if format not in FORMATS:
                assert torch.equal(content.data[expert], matrix)
                continue
            encode = encode_of({expert_name(stack, expert): matrix}, expert_name(stack, expert))
            alone = quantize_blockwise(matrix, format=FORMATS[format], encode=encode, kernel="reference")
            assert torch.equal(content.data[expert].view(torch.uint8), alone.data.view(torch.uint8))
            assert content.scale_inv is not None
            assert torch.equal(content.scale_inv[expert].view(torch.uint8), alone.scale_inv.view(torch.uint8))
            if alone.global_scale is not None:
                assert content.global_scale is not None
                assert float(content.global_scale[expert]) == float(alone.global_scale)


@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4", "bfloat16"])
@pytest.mark.parametrize("delta", [False, True])
def test_a_value_that_is_not_finite_is_refused_by_the_experts_name(format, delta):
    stream = Stream(by_experts(format, 2), by_experts(format, 1), bucket=1 << 20)
    stream.deliver(stack_values(), 0, keep=True)
    weights = stack_values()
    weights[DOWN][6, 5, 7] = torch.nan
    text = stream.refusal(weights, 1, delta=delta)
    assert f"{expert_name(DOWN, 6)}: 1 of 32768 values are not finite, the first at [5, 7]" in text


def test_fp8_values_of_an_expert_that_are_nan_are_named():
    (parts,) = by_experts("fp8", 1)
    sender, (sending, _) = WeightSender(parts, "pow2"), in_process_link(1 << 20, 20.0)
    weights = {name: [quantize_blockwise(matrix) for matrix in stack] for name, stack in stack_values().items()}
    weights[DOWN][3].data.view(torch.uint8)[5, 7] = 0xFF
    name = re.escape(expert_name(DOWN, 3))
    with pytest.raises(RefitError, match=f"refit 0: {name}: 1 of 32768 FP8 values.* are NaN; training diverged"):
        sender.send(weights.items(), 0, {(0, 0): Link(sending, tuple(parts))})
