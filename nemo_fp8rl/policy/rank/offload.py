"""Frees memory of a rank while an engine uses the GPU, and restores it in the same tensors.

training     gradients, which are discarded, and on a GPU the optimizer's state, which moves to the host
columns      the transposed copies of FP8 parameters; they are dropped and made again, as a refit reads only rows
parameters   on a GPU they move to the host (of FP8 parameters the rows); their tensors stay, without memory. Of a base
             that is never trained the host keeps its first copy
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from nemo_fp8rl.policy.layers.linears import QuantizedMatmul
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.optimizer.builders import (
    is_precision_aware,
    optimizer_parts,
    optimizer_tensors,
    steps_weights,
)
from nemo_fp8rl.policy.weights.fp8_params import drop_columns, make_columns, row_tensors


class Offload:
    """The offloadable memory of one rank, moved by Megatron's own functions.

    on_gpu:  False leaves the parameters, which are on the host, where they are
    """

    def __init__(self, ddp: DistributedDataParallel, optimizer: Any, on_gpu: bool) -> None:
        self.ddp, self.optimizer, self.on_gpu = ddp, optimizer, on_gpu
        self.buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
        self.frozen = FrozenMemory(ddp)
        self.offloaded_bytes: dict[str, int] = {}
        """Bytes of the memory that is away, by the three names above."""

    @property
    def nbytes(self) -> int:
        return sum(self.offloaded_bytes.values())

    def offload_training_state(self) -> None:
        if "training" in self.offloaded_bytes:
            return
        gradients = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in self.buffers)
        moved = sum(tensor.nbytes for tensor in optimizer_tensors(self.optimizer)) if self.on_gpu else 0
        self.offloaded_bytes["training"] = gradients + moved
        with megatron_on_cpu():
            self.ddp.offload_grad_buffers()
            for part in optimizer_parts(self.optimizer):
                move_states(part, "cpu") if self.on_gpu and is_precision_aware(part) else part.offload_to_cpu()

    def drop_fp8_columns(self) -> None:
        if "columns" not in self.offloaded_bytes:
            self.offloaded_bytes["columns"] = sum(drop_columns(parameter) for parameter in self.ddp.parameters())

    def offload_parameters(self) -> None:
        """Move all parameters to the host."""
        if "parameters" in self.offloaded_bytes or not self.on_gpu:
            return
        self.drop_fp8_columns()
        self.offloaded_bytes["parameters"] = sum(
            buffer.param_data.untyped_storage().nbytes() for buffer in self.buffers
        )
        self.offloaded_bytes["parameters"] += self.frozen.offload()
        for buffer in self.buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=False)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # without this call the process keeps the memory

    def restore_training_state(self) -> None:
        if self.offloaded_bytes.pop("training", None) is not None:
            with megatron_on_cpu():
                self.ddp.restore_grad_buffers()
                for part in optimizer_parts(self.optimizer):
                    move_states(part, "cuda") if self.on_gpu and is_precision_aware(part) else part.restore_from_cpu()

    def restore_parameters(self, columns: bool = True) -> None:
        """Bring the parameters back before they are read or written.

        columns:  also make the columns of FP8 parameters
        """
        if self.offloaded_bytes.pop("parameters", None) is not None:
            for buffer in self.buffers:
                buffer.reload_from_cpu(move_params=True, move_grads=False)
            self.frozen.restore()
        if columns and self.offloaded_bytes.pop("columns", None) is not None:
            for parameter in self.ddp.parameters():
                make_columns(parameter)


def move_states(part: Any, device: str) -> None:
    """Move the state of a precision-aware part.

    Megatron's own function would move the pieces as well. They are views of its buffer of weights: after it, a step
    would write their copies, and no weight would change any more.
    """
    if not steps_weights(part):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                master.data = master.data.to(device=device)
    part.optimizer.move(device)
    torch.cuda.empty_cache()


class FrozenMemory:
    """The memory of weights that are never trained, for which Megatron has no buffer.

    copies:  (bytes of the memory, copy on the host); made by the first offload
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies: list[tuple[Tensor, Tensor]] = []

    def offload(self) -> int:
        """Free the memory and return its bytes."""
        if not self.copies:
            self.copies = [(memory, copy_to_host(memory)) for memory in self._memory()]
        for memory, _ in self.copies:
            memory.untyped_storage().resize_(0)
        return sum(copy.nbytes for _, copy in self.copies)

    def restore(self) -> None:
        for memory, copy in self.copies:
            memory.untyped_storage().resize_(copy.nbytes)
            memory.copy_(copy, non_blocking=True)

    def _memory(self) -> Iterator[Tensor]:
        """Yield all bytes of each storage, uint8."""
        tensors = [row for p in self.model.parameters() if not p.requires_grad for row in row_tensors(p)]
        for layer in self.model.modules():
            if isinstance(layer, QuantizedMatmul) and layer.base is not None:
                tensors += [layer.base.data, layer.base.scale_inv]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.nbytes}
        for tensor in storages.values():
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host; pinned if it came from a GPU, as the way back from pageable memory copies twice."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
