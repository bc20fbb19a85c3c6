"""The matrices of a layer's experts as one tensor of a refit.

A mixture has tens of thousands of expert matrices, and what a refit does for each piece costs more than its bytes. So
the matrices of one projection of a layer travel as a stack [experts, rows, columns], of which a piece has many.

    model.layers.0.mlp.experts.5.gate_proj.weight  ->  expert 5 of model.layers.0.mlp.experts.gate_proj.weight
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from nemo_fp8rl.fp8 import BlockScaled
from nemo_fp8rl.refit.manifest import RefitError, TensorPart

EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.((?:gate|up|down)_proj\.weight)$")
STACK = re.compile(r"^(.*\.experts)\.((?:gate|up|down)_proj\.weight)$")

Matrix = Tensor | BlockScaled
Weight = Matrix | list[Matrix]
"""A weight, or the matrices of a stack in the order of its experts."""


@functools.cache
def stack_of(name: str) -> tuple[str, int] | None:
    """Return (name of the stack, expert) of an expert's matrix; None of any other tensor."""
    found = EXPERT.match(name)
    return (f"{found[1]}.{found[3]}", int(found[2])) if found else None


@functools.cache
def expert_name(stack: str, expert: int) -> str:
    """Return the HF name of a matrix of a stack."""
    found = STACK.match(stack)
    assert found is not None, stack
    return f"{found[1]}.{expert}.{found[2]}"


def stack_parts(parts: Iterable[TensorPart], experts: int) -> list[TensorPart]:
    """Return the parts with those of experts as parts of stacks, at the place of the first of each.

    experts: of a layer, on all ranks
    Raises:  RefitError where a rank's experts have no neighbouring numbers, or unequal parts
    """
    stacks: dict[str, list[tuple[int, TensorPart]]] = {}
    order: list[TensorPart | str] = []
    for part in parts:
        if (found := stack_of(part.name)) is None:
            order.append(part)
            continue
        name, expert = found
        if name not in stacks:
            stacks[name] = []
            order.append(name)
        stacks[name].append((expert, part))
    return [_stack(item, stacks[item], experts) if isinstance(item, str) else item for item in order]


def _stack(name: str, members: Sequence[tuple[int, TensorPart]], experts: int) -> TensorPart:
    numbers, first = [number for number, _ in members], members[0][1]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise RefitError(f"{name}: a rank has experts {numbers}, which are no neighbours in ascending order")
    if len({replace(part, name=name) for _, part in members}) > 1:
        raise RefitError(f"{name}: a rank has unequal parts of its experts")
    span = numbers[0], numbers[-1] + 1
    return replace(first, name=name, shape=(experts, *first.shape), region=(span, *first.region))


def stack_weights(weights: Iterable[tuple[str, Matrix]], counts: dict[str, int]) -> Iterator[tuple[str, Weight]]:
    """Yield the weights with the matrices of experts as lists, each as soon as its last matrix is there.

    counts: matrices of each stack, by its name
    """
    stacks: dict[str, list[Matrix]] = {}
    for name, weight in weights:
        if (found := stack_of(name)) is None:
            yield name, weight
            continue
        matrices = stacks.setdefault(found[0], [])
        matrices.append(weight)
        if len(matrices) == counts[found[0]]:
            yield found[0], stacks.pop(found[0])
    assert not stacks, f"the trainer did not hand out all of {next(iter(stacks))}"
