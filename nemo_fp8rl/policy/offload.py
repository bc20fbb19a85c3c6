"""What of a rank's memory is given back while an engine has the GPU, and taken again where it was.

training     gradients, which are not kept, and on a GPU the optimizer's state, which goes to the host
columns      of parameters in FP8, which are their rows, transposed: dropped, and made again; a refit reads rows alone
parameters   on a GPU, to the host; their tensors stay and have no memory meanwhile. Of those in FP8 the rows
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.optimizer import optimizer_parts
from nemo_fp8rl.policy.weights.fp8_params import drop_columns, make_columns


class Offload:
    """Memory of one rank, given and taken by Megatron's means. on_gpu: else parameters are on the host, and stay."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: Any, on_gpu: bool) -> None:
        self.ddp, self.optimizer, self.on_gpu = ddp, optimizer, on_gpu
        self.buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
        self.away: dict[str, int] = {}
        """Bytes of what is away, by the names above."""

    @property
    def nbytes(self) -> int:
        return sum(self.away.values())

    def give_training(self) -> None:
        if "training" in self.away:
            return
        gradients = sum(buffer.grad_data.untyped_storage().nbytes() for buffer in self.buffers)
        moved = sum(tensor.nbytes for tensor in self._optimizer_tensors()) if self.on_gpu else 0
        self.away["training"] = gradients + moved
        with megatron_on_cpu():
            self.ddp.offload_grad_buffers()
            self.optimizer.offload_to_cpu()

    def give_columns(self) -> None:
        if "columns" not in self.away:
            self.away["columns"] = sum(drop_columns(parameter) for parameter in self.ddp.parameters())

    def give_parameters(self) -> None:
        """Give all but frozen ones, of which Megatron makes no buffer."""
        if "parameters" in self.away or not self.on_gpu:
            return
        self.give_columns()
        self.away["parameters"] = sum(buffer.param_data.untyped_storage().nbytes() for buffer in self.buffers)
        for buffer in self.buffers:
            buffer.offload_to_cpu(move_params=True, move_grads=False)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # or this process would keep the memory for itself

    def take_training(self) -> None:
        if self.away.pop("training", None) is not None:
            with megatron_on_cpu():
                self.ddp.restore_grad_buffers()
                self.optimizer.restore_from_cpu()

    def take_parameters(self, columns: bool = True) -> None:
        """Take parameters back before anything reads or writes them. columns: it reads or writes these, too."""
        if self.away.pop("parameters", None) is not None:
            for buffer in self.buffers:
                buffer.reload_from_cpu(move_params=True, move_grads=False)
        if columns and self.away.pop("columns", None) is not None:
            for parameter in self.ddp.parameters():
                make_columns(parameter)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for part in optimizer_parts(self.optimizer):
            if part.optimizer is not None:
                for group in part.optimizer.param_groups:
                    yield from group["params"]
                for state in part.optimizer.state.values():
                    yield from (tensor for tensor in state.values() if isinstance(tensor, Tensor))
