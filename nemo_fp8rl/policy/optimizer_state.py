"""The optimizer's state on disk, by HF names: a checkpoint of one layout loads on ranks of any other.

rank_R.safetensors   float32 masters and Adam's moments of the weights, or parts of weights, that this rank wrote
steps.json           steps of Adam and of the schedule

Megatron's distributed optimizer cuts each parameter, flattened, into the pieces of its data-parallel ranks. They are
brought together one parameter at a time and go through the same mapping as the weights (`megatron_names`), so tensor,
pipeline, expert and data parallelism may all be others when the state is read. Nothing is pickled, nothing converted:
on the same layout the run goes on to the bit.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.hf.parts import PartReader, PartWriter
from nemo_fp8rl.hf.region import start_of
from nemo_fp8rl.hf.tensors import expected_tensors
from nemo_fp8rl.policy.layout import Layout
from nemo_fp8rl.policy.megatron_names import from_hf, to_hf
from nemo_fp8rl.policy.weights import assembled

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
STEPS = "steps.json"


def save_optimizer(
    folder: Path, rank: int, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any
) -> Exception | None:
    """All ranks call it together; one of those that hold the same writes it. Returns what kept this rank from it."""
    writer = PartWriter(folder, f"rank_{rank}")
    held = pieces(model, optimizer)
    steps = set(_steps_taken(optimizer))
    assert len(steps) <= 1, f"parameters have taken different numbers of steps: {steps}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            record = {"adam": max(steps, default=0.0), "schedule": scheduler.num_steps}
            (folder / STEPS).write_text(json.dumps(record) + "\n")
    except OSError as error:
        writer.error = error
    parameters, shapes = dict(model.named_parameters()), expected_tensors(layout.hf)
    # every rank of a group gathers, so all must agree on whether there are moments: they do, steps are the world's
    for kind in (MASTER, *(MOMENTS if _any_has_stepped(bool(steps)) else ())):

        def gathered(name: str, kind: str = kind) -> Tensor:
            return _gathered(parameters[name], held.get(name), kind)

        for name, part in to_hf(layout, gathered):
            if layout.writes(name):
                writer.add(f"{name}.{kind}", part, start_of(layout.region(name, shapes[name])))
    writer.close()
    return writer.error


@torch.no_grad()
def load_optimizer(folder: Path, layout: Layout, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Restore what `save_optimizer` wrote, on whatever ranks. Raises UserError when it is not complete."""
    try:
        record = json.loads((folder / STEPS).read_text())
        adam_steps, schedule_steps = float(record["adam"]), int(record["schedule"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / STEPS} cannot be read ({error}); the checkpoint is not complete") from None
    held, shapes = pieces(model, optimizer), expected_tensors(layout.hf)
    with PartReader(folder) as reader:
        for kind in (MASTER, *(MOMENTS if adam_steps else ())):

            def part(name: str, kind: str = kind) -> Tensor:
                return reader.get(f"{name}.{kind}", layout.region(name, shapes[name]))

            for name, whole in from_hf(layout, part):
                if name in held:
                    piece = held[name]
                    own = whole.flatten()[slice(*piece.place)]
                    if kind == MASTER:
                        piece.master.copy_(own)
                    else:
                        piece.adam[kind] = own.to(piece.master.device, copy=True)
    if adam_steps:
        _set_steps(optimizer, adam_steps)
    scheduler.num_steps = 0
    scheduler.step(increment=schedule_steps)


def gathered_masters(model: torch.nn.Module, optimizer: Any) -> Callable[[str], Tensor]:
    """The float32 master of a parameter, by Megatron's name; whole on the first data-parallel rank, garbage on others.

    All ranks that have the parameter ask together.
    """
    parameters, held = dict(model.named_parameters()), pieces(model, optimizer)
    return lambda name: _gathered(parameters[name], held.get(name), MASTER)


def _gathered(parameter: torch.nn.Parameter, piece: "Piece | None", kind: str) -> Tensor:
    """float32, the parameter's shape: its master or one of Adam's moments, on the first rank that shares it."""
    if not parameter.requires_grad:  # it has no state: freed, it begins with moments of 0
        return parameter.detach().float() if kind == MASTER else torch.zeros(parameter.shape)
    part = None if piece is None else (piece.master if kind == MASTER else piece.adam[kind]).detach()
    region = ((0, 0) if piece is None else piece.place,)
    return assembled(part, region, [parameter.numel()], _copies(parameter)).view(parameter.shape)


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers of this rank's parameters: one, or with experts two."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _steps_taken(optimizer: Any) -> Iterator[float]:
    """Of Adam: torch's counts for each parameter, Transformer Engine's for each group of them."""
    for adam in (part.optimizer for part in _parts(optimizer)):
        for group in adam.param_groups:
            if isinstance(adam, torch.optim.Adam):
                yield from (float(adam.state[master]["step"]) for master in group["params"] if adam.state[master])
            elif group["params"] and "step" in group:  # an empty one is passed over by every step
                yield float(group["step"])


def _set_steps(optimizer: Any, steps: float) -> None:
    for adam in (part.optimizer for part in _parts(optimizer)):
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


def _any_has_stepped(stepped: bool) -> bool:
    """A rank may hold no piece at all, and so no state."""
    flag = torch.tensor(float(stepped))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


class Piece(NamedTuple):
    """What a rank has of a parameter's state. place: start and end in the parameter, flattened."""

    place: tuple[int, int]
    master: Tensor
    adam: dict[str, Any]


def pieces(model: torch.nn.Module, optimizer: Any) -> dict[str, Piece]:
    """By Megatron's names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for part in _parts(optimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            master = part.optimizer.param_groups[group]["params"][order]
            place = part._get_model_param_range_map(parameter)["param"]
            found[names[parameter]] = Piece((place.start, place.end), master, part.optimizer.state[master])
    return found
