"""The optimizer's state on disk, by HF names, so that ranks of any layout can load it.

rank_R*.safetensors   float32 masters and Adam's moments of the parts of weights that this rank has
steps.json            steps of Adam and of the schedule

Megatron's distributed optimizer cuts each flattened parameter into slices, one for each data-parallel rank. Each rank
writes and reads its slices by their positions in HF tensors (`flat_slices`). So nothing is gathered, and tensor,
pipeline, expert and data parallelism may all differ when the state is read. Nothing is pickled or converted: on the
same layout the run continues to the bit.
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
from nemo_fp8rl.hf.storage.part_files import PartReader, PartWriter
from nemo_fp8rl.policy.optimizer.builders import optimizer_parts
from nemo_fp8rl.policy.weights.adapter_names import trained_tensors
from nemo_fp8rl.policy.weights.checkpoint import assemble_on_first
from nemo_fp8rl.policy.weights.flat_slices import locate_rows, slice_boxes
from nemo_fp8rl.policy.weights.hf_names import MEGATRON_HEAD
from nemo_fp8rl.policy.weights.layout import Layout

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
STEPS = "steps.json"
FILE_BYTES = 1 << 30
"""Approximate bytes of a file; every rank of a host has as many bytes waiting in memory."""


def save_optimizer(
    folder: Path, rank: int, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any
) -> Exception | None:
    """Write the state; all ranks call it together. Returns the error that kept this rank from writing."""
    writer = PartWriter(folder, f"rank_{rank}", FILE_BYTES)
    adam_steps = count_adam_steps(optimizer)
    try:
        folder.mkdir(exist_ok=True)
        if rank == 0:
            record = {"adam": adam_steps, "schedule": scheduler.num_steps}
            (folder / STEPS).write_text(json.dumps(record) + "\n")
    except OSError as error:
        writer.error = error
    parameters, slices = dict(model.named_parameters()), state_slices(model, optimizer)
    for parameter, runs in locate_rows(layout, trained_tensors(layout)):
        if parameter == MEGATRON_HEAD and layout.hf.tie_word_embeddings:
            continue  # the first stage writes the same values
        frozen = not parameters[parameter].requires_grad
        local_runs = [rows for rows in runs if (layout.is_writer if frozen else layout.may_send)(rows.name)]
        state = _frozen_state(parameters[parameter]) if frozen and local_runs else slices.get(parameter)
        if state is None:
            continue
        for rows, kind in product(local_runs, _value_kinds(adam_steps)):
            for elements, region in slice_boxes(rows, state.span):
                part = state.values(kind)[elements].view(shape_of(region))
                writer.add(f"{rows.name}.{kind}", part, start_of(region))
    writer.close()
    return writer.error


@torch.no_grad()
def load_optimizer(folder: Path, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Restore the state that `save_optimizer` wrote on ranks of any layout.

    Raises UserError if the state is incomplete or belongs to another model.
    """
    try:
        record = json.loads((folder / STEPS).read_text())
        adam_steps, schedule_steps = float(record["adam"]), int(record["schedule"])
        if not (0 <= adam_steps < math.inf and schedule_steps >= 0):
            raise ValueError(f"steps of {adam_steps:g} and {schedule_steps}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{folder / STEPS} cannot be read ({error}); the checkpoint is not complete") from None
    slices, shapes = state_slices(model, optimizer), trained_tensors(layout)
    with PartReader(folder) as reader:
        reader.check({f"{name}.{kind}": shape for name, shape in shapes.items() for kind in (MASTER, *MOMENTS)})
        for (parameter, runs), kind in product(locate_rows(layout, shapes), _value_kinds(adam_steps)):
            if (state := slices.get(parameter)) is None:
                continue
            values = torch.zeros(state.master.numel())  # padding stays 0
            for rows in runs:
                for elements, region in slice_boxes(rows, state.span):
                    values[elements] = reader.get(f"{rows.name}.{kind}", region).flatten()
            if kind == MASTER:
                state.master.copy_(values)
            else:
                state.adam[kind] = values.to(state.master.device)
    if adam_steps:
        _set_steps(optimizer, adam_steps)
    scheduler.num_steps = 0
    scheduler.step(increment=schedule_steps)


def make_master_gatherer(model: torch.nn.Module, optimizer: Any) -> Callable[[str], Tensor]:
    """Return a function from Megatron's name of a parameter to its float32 master.

    All ranks that have the parameter call the function together. Its result is whole on the first data-parallel rank
    and garbage on the others.
    """
    parameters, slices = dict(model.named_parameters()), state_slices(model, optimizer)

    def gather_master(name: str) -> Tensor:
        parameter, state = parameters[name], slices.get(name)
        if not parameter.requires_grad:
            return parameter.detach().float()
        part, span = (None, (0, 0)) if state is None else (state.master.detach(), state.span)
        return assemble_on_first(part, (span,), [parameter.numel()], _replica_group(parameter)).view(parameter.shape)

    return gather_master


def _value_kinds(adam_steps: float) -> tuple[str, ...]:
    """Return the kinds of values that a weight has after this number of Adam steps."""
    return (MASTER, *MOMENTS) if adam_steps else (MASTER,)


def _adam_step_counts(optimizer: Any) -> Iterator[float]:
    """Yield Adam's step counts: torch has one for each parameter, Transformer Engine one for each group."""
    for adam in (part.optimizer for part in optimizer_parts(optimizer)):
        for group in adam.param_groups:
            if isinstance(adam, torch.optim.Adam):
                yield from (float(adam.state[master]["step"]) for master in group["params"] if adam.state[master])
            elif group["params"] and "step" in group:  # a step skips an empty group
                yield float(group["step"])


def _set_steps(optimizer: Any, steps: float) -> None:
    for adam in (part.optimizer for part in optimizer_parts(optimizer)):
        for group in adam.param_groups:
            if isinstance(adam, torch.optim.Adam):
                for master in group["params"]:
                    # One tensor for each: Megatron's loader shares a tensor, and Adam then counts wrongly.
                    adam.state[master]["step"] = torch.tensor(steps)
            elif group["params"]:
                group["step"] = int(steps)


def _replica_group(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """Return the data-parallel ranks that split this parameter's optimizer state."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def count_adam_steps(optimizer: Any) -> float:
    """Return the steps that Adam has taken on all ranks; a rank without any state has no count."""
    counts = set(_adam_step_counts(optimizer))
    assert len(counts) <= 1, f"parameters have taken different numbers of steps: {counts}"
    steps = torch.tensor(max(counts, default=0.0))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return float(steps)


class StateSlice(NamedTuple):
    """A rank's slice of a parameter's optimizer state.

    span:    (start, stop) in the flattened parameter
    master:  float32 [stop - start]
    adam:    Adam's state of the slice, by kind
    """

    span: tuple[int, int]
    master: Tensor
    adam: dict[str, Any]

    def values(self, kind: str) -> Tensor:
        return (self.master if kind == MASTER else self.adam[kind]).detach()


def state_slices(model: torch.nn.Module, optimizer: Any) -> dict[str, StateSlice]:
    """Return the rank's slice of each parameter's state, by Megatron's name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    slices = {}
    for part in optimizer_parts(optimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            master = part.optimizer.param_groups[group]["params"][order]
            bounds = part._get_model_param_range_map(parameter)["param"]
            slices[names[parameter]] = StateSlice((bounds.start, bounds.end), master, part.optimizer.state[master])
    return slices


def _frozen_state(parameter: torch.nn.Parameter) -> StateSlice:
    """Return the whole of a frozen parameter, with moments of 0, with which it starts if a later run trains it."""
    values = parameter.detach().float().flatten()
    return StateSlice((0, values.numel()), values, dict.fromkeys(MOMENTS, torch.zeros_like(values)))
