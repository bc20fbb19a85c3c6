"""The optimizer's state on disk, by HF names: a checkpoint of one layout loads on ranks of any other.

rank_R*.safetensors   float32 masters and Adam's moments of the parts of weights that this rank has
steps.json            steps of Adam and of the schedule

Megatron's distributed optimizer cuts each parameter, flattened, into the pieces of its data-parallel ranks. Each rank
writes its own and reads its own, by their places in HF tensors (`flat_pieces`), so nothing is gathered, and tensor,
pipeline, expert and data parallelism may all be others when the state is read. Nothing is pickled, nothing converted:
on the same layout the run goes on to the bit.
"""

import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import shape_of, start_of
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.hf.part_files import PartReader, PartWriter
from nemo_fp8rl.policy.optimizer import optimizer_parts
from nemo_fp8rl.policy.weights.checkpoint import assembled
from nemo_fp8rl.policy.weights.flat_slices import boxes, rows_of
from nemo_fp8rl.policy.weights.hf_names import MEGATRON_HEAD
from nemo_fp8rl.policy.weights.layout import Layout

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
STEPS = "steps.json"
FILE_BYTES = 1 << 30
"""Bytes of a file, about: every rank of a host has as much waiting."""


def save_optimizer(
    folder: Path, rank: int, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any
) -> Exception | None:
    """All ranks call it together. Returns what kept this one from writing."""
    writer = PartWriter(folder, f"rank_{rank}", FILE_BYTES)
    adam_steps = _steps_of_all(optimizer)
    try:
        folder.mkdir(exist_ok=True)
        if rank == 0:
            record = {"adam": adam_steps, "schedule": scheduler.num_steps}
            (folder / STEPS).write_text(json.dumps(record) + "\n")
    except OSError as error:
        writer.error = error
    parameters, held = dict(model.named_parameters()), pieces(model, optimizer)
    for parameter, where in rows_of(layout, expected_tensors(layout.hf)):
        if parameter == MEGATRON_HEAD and layout.hf.tie_word_embeddings:
            continue  # the first stage has the same
        frozen = not parameters[parameter].requires_grad
        mine = [rows for rows in where if (layout.writes if frozen else layout.sends)(rows.name)]
        piece = _of_frozen(parameters[parameter]) if frozen and mine else held.get(parameter)
        if piece is None:
            continue
        for rows, kind in product(mine, _kinds(adam_steps)):
            for elements, region in boxes(rows, piece.place):
                part = piece.state(kind)[elements].view(shape_of(region))
                writer.add(f"{rows.name}.{kind}", part, start_of(region))
    writer.close()
    return writer.error


@torch.no_grad()
def load_optimizer(folder: Path, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Restore what `save_optimizer` wrote, on whatever ranks. Raises UserError where it is not complete, or is of
    another model.
    """
    try:
        record = json.loads((folder / STEPS).read_text())
        adam_steps, schedule_steps = float(record["adam"]), int(record["schedule"])
        if not (0 <= adam_steps < math.inf and schedule_steps >= 0):
            raise ValueError(f"steps of {adam_steps:g} and {schedule_steps}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{folder / STEPS} cannot be read ({error}); the checkpoint is not complete") from None
    held, shapes = pieces(model, optimizer), expected_tensors(layout.hf)
    with PartReader(folder) as reader:
        reader.check({f"{name}.{kind}": shape for name, shape in shapes.items() for kind in (MASTER, *MOMENTS)})
        for (parameter, where), kind in product(rows_of(layout, shapes), _kinds(adam_steps)):
            if (piece := held.get(parameter)) is None:
                continue
            values = torch.zeros(piece.master.numel())  # of padding
            for rows in where:
                for elements, region in boxes(rows, piece.place):
                    values[elements] = reader.get(f"{rows.name}.{kind}", region).flatten()
            if kind == MASTER:
                piece.master.copy_(values)
            else:
                piece.adam[kind] = values.to(piece.master.device)
    if adam_steps:
        _set_steps(optimizer, adam_steps)
    scheduler.num_steps = 0
    scheduler.step(increment=schedule_steps)


def gathered_masters(model: torch.nn.Module, optimizer: Any) -> Callable[[str], Tensor]:
    """The float32 master of a parameter, by Megatron's name; whole on the first data-parallel rank, garbage on others.

    All ranks that have the parameter ask together.
    """
    parameters, held = dict(model.named_parameters()), pieces(model, optimizer)

    def gathered(name: str) -> Tensor:
        parameter, piece = parameters[name], held.get(name)
        if not parameter.requires_grad:
            return parameter.detach().float()
        part, place = (None, (0, 0)) if piece is None else (piece.master.detach(), piece.place)
        return assembled(part, (place,), [parameter.numel()], _copies(parameter)).view(parameter.shape)

    return gathered


def _kinds(adam_steps: float) -> tuple[str, ...]:
    """Kinds of values that a weight has after so many steps of Adam."""
    return (MASTER, *MOMENTS) if adam_steps else (MASTER,)


def _steps_taken(optimizer: Any) -> Iterator[float]:
    """Steps that Adam has taken: torch's counts for each parameter, Transformer Engine's for each group of them."""
    for adam in (part.optimizer for part in optimizer_parts(optimizer)):
        for group in adam.param_groups:
            if isinstance(adam, torch.optim.Adam):
                yield from (float(adam.state[master]["step"]) for master in group["params"] if adam.state[master])
            elif group["params"] and "step" in group:  # an empty one is passed over by every step
                yield float(group["step"])


def _set_steps(optimizer: Any, steps: float) -> None:
    for adam in (part.optimizer for part in optimizer_parts(optimizer)):
        for group in adam.param_groups:
            if isinstance(adam, torch.optim.Adam):
                for master in group["params"]:
                    # A tensor of its own for each: Megatron's own loader shares one, and Adam then counts wrongly.
                    adam.state[master]["step"] = torch.tensor(steps)
            elif group["params"]:
                group["step"] = int(steps)


def _copies(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """The data-parallel ranks that share out this parameter's optimizer state."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _steps_of_all(optimizer: Any) -> float:
    """Steps that Adam has taken on all ranks; one may hold no piece at all, and so have no count."""
    own = set(_steps_taken(optimizer))
    assert len(own) <= 1, f"parameters have taken different numbers of steps: {own}"
    steps = torch.tensor(max(own, default=0.0))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return float(steps)


class Piece(NamedTuple):
    """What a rank has of a parameter's state. place: start and end in the parameter, flattened."""

    place: tuple[int, int]
    master: Tensor
    adam: dict[str, Any]

    def state(self, kind: str) -> Tensor:
        return (self.master if kind == MASTER else self.adam[kind]).detach()


def pieces(model: torch.nn.Module, optimizer: Any) -> dict[str, Piece]:
    """Megatron's name of a parameter -> the rank's piece of its state."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for part in optimizer_parts(optimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            master = part.optimizer.param_groups[group]["params"][order]
            place = part._get_model_param_range_map(parameter)["param"]
            found[names[parameter]] = Piece((place.start, place.end), master, part.optimizer.state[master])
    return found


def _of_frozen(parameter: torch.nn.Parameter) -> Piece:
    """The whole of a frozen parameter, which has no state: freed, it begins with moments of 0."""
    values = parameter.detach().float().flatten()
    return Piece((0, values.numel()), values, dict.fromkeys(MOMENTS, torch.zeros_like(values)))
