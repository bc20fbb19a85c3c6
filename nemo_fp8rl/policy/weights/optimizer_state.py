"""The optimizer's state on disk, by HF names, so that ranks of any layout can load it.

rank_R*.safetensors   float32 masters and Adam's moments of the parts of weights that this rank has
steps.json            steps of Adam and of the schedule, and the scale of the loss in float16
scales_R.json         scales of the rank's pieces that it keeps in float16 or FP8

Megatron's distributed optimizer cuts each flattened parameter into slices, one for each data-parallel rank. Each rank
writes and reads its slices by their positions in HF tensors (`flat_slices`). So nothing is gathered, and tensor,
pipeline, expert and data parallelism may all differ when the state is read, and so may the dtypes that ranks keep.
Nothing is pickled. On the same layout the run continues to the bit: values times a scale, rounded with the same scale
again, are the same bytes. A piece of other elements, or of another dtype, chooses a scale of its own.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
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
from nemo_fp8rl.policy.optimizer.builders import is_precision_aware, optimizer_parts, steps_weights
from nemo_fp8rl.policy.optimizer.loss_scale import LossScale
from nemo_fp8rl.policy.optimizer.scaled_adam import MASTER, MOMENTS
from nemo_fp8rl.policy.weights.adapter_names import trained_tensors
from nemo_fp8rl.policy.weights.checkpoint import assemble_on_first
from nemo_fp8rl.policy.weights.flat_slices import RowRun, locate_rows, slice_boxes
from nemo_fp8rl.policy.weights.hf_names import MEGATRON_HEAD
from nemo_fp8rl.policy.weights.layout import Layout

STEPS = "steps.json"
FILE_BYTES = 1 << 30
"""Approximate bytes of a file; every rank of a host has as many bytes waiting in memory."""


def save_optimizer(
    folder: Path, rank: int, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any
) -> Exception | None:
    """Write the state; all ranks call it together. Returns the error that kept this rank from writing."""
    writer = PartWriter(folder, f"rank_{rank}", FILE_BYTES)
    adam_steps, loss_scale = count_adam_steps(optimizer), LossScale.of(optimizer)
    try:
        folder.mkdir(exist_ok=True)
        if rank == 0:
            record: dict[str, Any] = {"adam": adam_steps, "schedule": scheduler.num_steps}
            if loss_scale is not None:
                record["loss_scale"] = loss_scale.state()
            (folder / STEPS).write_text(json.dumps(record) + "\n")
    except OSError as error:
        writer.error = error
    parameters, slices = dict(model.named_parameters()), state_slices(model, optimizer)
    scales: dict[str, dict[str, float]] = {}
    for parameter, runs in locate_rows(layout, trained_tensors(layout)):
        if parameter in slices and (of_piece := slices[parameter].scales()):
            scales[_name_piece(runs, slices[parameter].span)] = of_piece
        if parameter == MEGATRON_HEAD and layout.hf.tie_word_embeddings:
            continue  # the first stage writes the same values
        frozen = not parameters[parameter].requires_grad
        local_runs = [rows for rows in runs if (layout.is_writer if frozen else layout.may_send)(rows.name)]
        state = _frozen_state(parameters[parameter]) if frozen and local_runs else slices.get(parameter)
        if state is None:
            continue
        values = {kind: state.values(kind) for kind in _value_kinds(adam_steps)} if local_runs else {}
        for rows, kind in product(local_runs, values):
            for elements, region in slice_boxes(rows, state.span):
                part = values[kind][elements].view(shape_of(region))
                writer.add(f"{rows.name}.{kind}", part, start_of(region))
    writer.close()
    try:
        if scales:
            (folder / f"scales_{rank}.json").write_text(json.dumps(scales) + "\n")
    except OSError as error:
        return writer.error or error
    return writer.error


def _name_piece(runs: Sequence[RowRun], span: tuple[int, int]) -> str:
    """Return a name of the elements of a slice, which is the same wherever a rank has this slice."""
    boxes = [(rows.name, region) for rows in runs for _, region in slice_boxes(rows, span)]
    return sha256(repr(boxes).encode()).hexdigest()


def _read_scales(folder: Path) -> dict[str, dict[str, float]]:
    """Return the scales that all ranks wrote, by the name of the piece. Raises UserError."""
    scales: dict[str, dict[str, float]] = {}
    for file in folder.glob("scales_*.json"):
        try:
            scales |= {
                name: {kind: float(scale) for kind, scale in piece.items()}
                for name, piece in json.loads(file.read_text()).items()
            }
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file} cannot be read ({error}); the checkpoint is not complete") from None
    return scales


@torch.no_grad()
def load_optimizer(folder: Path, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Restore the state that `save_optimizer` wrote on ranks of any layout.

    Raises UserError if the state is incomplete or belongs to another model.
    """
    loss_scale = LossScale.of(optimizer)
    try:
        record = json.loads((folder / STEPS).read_text())
        adam_steps, schedule_steps = float(record["adam"]), int(record["schedule"])
        if not (0 <= adam_steps < math.inf and schedule_steps >= 0):
            raise ValueError(f"steps of {adam_steps:g} and {schedule_steps}")
        if loss_scale is not None:
            loss_scale.load(record["loss_scale"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{folder / STEPS} cannot be read ({error}); the checkpoint is not complete") from None
    slices, shapes, scales = state_slices(model, optimizer), trained_tensors(layout), _read_scales(folder)
    with PartReader(folder) as reader:
        reader.check({f"{name}.{kind}": shape for name, shape in shapes.items() for kind in (MASTER, *MOMENTS)})
        for (parameter, runs), kind in product(locate_rows(layout, shapes), _value_kinds(adam_steps)):
            if (state := slices.get(parameter)) is None:
                continue
            values = torch.zeros(state.span[1] - state.span[0])  # padding stays 0
            for rows in runs:
                for elements, region in slice_boxes(rows, state.span):
                    values[elements] = reader.get(f"{rows.name}.{kind}", region).flatten()
            state.assign(kind, values, scales.get(_name_piece(runs, state.span), {}))
    if adam_steps:
        _set_steps(optimizer, adam_steps)
    if ddp := next((part.model_chunks[0] for part in optimizer_parts(optimizer) if steps_weights(part)), None):
        ddp.start_param_sync()  # a master may have set the last bit of a weight, which other ranks have as well
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
        part, span = (None, (0, 0)) if state is None else (state.values(MASTER), state.span)
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
    """A rank's slice of a parameter's optimizer state, in float32.

    span:    (start, stop) in the flattened parameter
    master:  float32 [stop - start]
    adam:    Adam's state of the slice, by kind
    """

    span: tuple[int, int]
    master: Tensor
    adam: dict[str, Any]

    def values(self, kind: str) -> Tensor:
        return (self.master if kind == MASTER else self.adam[kind]).detach()

    def assign(self, kind: str, values: Tensor, scales: Mapping[str, float]) -> None:
        if kind == MASTER:
            self.master.copy_(values)
        else:
            self.adam[kind] = values.to(self.master.device)

    def scales(self) -> dict[str, float]:
        return {}


class AwareSlice(NamedTuple):
    """`StateSlice` of a precision-aware optimizer.

    piece:  the slice of the weight, or its float32 master
    adam:   the optimizer, which reads and writes the state
    """

    span: tuple[int, int]
    piece: Tensor
    adam: Any

    def values(self, kind: str) -> Tensor:
        return self.adam.read(self.piece, kind).detach()

    def assign(self, kind: str, values: Tensor, scales: Mapping[str, float]) -> None:
        """Set float32 values; they take their scale from `scales` if it has one of this kind and dtype."""
        self.adam.write(self.piece, kind, values, scales.get(self._name(kind)))

    def scales(self) -> dict[str, float]:
        """Return the scales of the slice, by kind and dtype."""
        scales = {self._name(kind): self.adam.scale(self.piece, kind) for kind in (MASTER, *MOMENTS)}
        return {name: scale for name, scale in scales.items() if scale is not None}

    def _name(self, kind: str) -> str:
        return f"{kind}.{self.adam.dtypes[kind]}".replace("torch.", "")


def state_slices(model: torch.nn.Module, optimizer: Any) -> dict[str, StateSlice | AwareSlice]:
    """Return the rank's slice of each parameter's state, by Megatron's name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    slices: dict[str, StateSlice | AwareSlice] = {}
    for part in optimizer_parts(optimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            piece = part.optimizer.param_groups[group]["params"][order]
            bounds = part._get_model_param_range_map(parameter)["param"]
            span = bounds.start, bounds.end
            slices[names[parameter]] = (
                AwareSlice(span, piece, part.optimizer)
                if is_precision_aware(part)
                else StateSlice(span, piece, part.optimizer.state[piece])
            )
    return slices


def _frozen_state(parameter: torch.nn.Parameter) -> StateSlice:
    """Return the whole of a frozen parameter, with moments of 0, with which it starts if a later run trains it."""
    values = parameter.detach().float().flatten()
    return StateSlice((0, values.numel()), values, dict.fromkeys(MOMENTS, torch.zeros_like(values)))
