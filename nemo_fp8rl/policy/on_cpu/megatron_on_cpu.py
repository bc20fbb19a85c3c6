"""Lets Megatron Core 0.16 and 0.19 run without a CUDA device, inside the block of `megatron_on_cpu`.

Megatron names CUDA literally in places that have no setting: `torch.cuda.current_device()` for DDP buffers and
embeddings, `device="cuda"` and `'torch.cuda.FloatTensor'` in the optimizer, clip_grads.py and the log-prob kernels,
`torch.cuda.synchronize()` in timers, CUDA's random state when it recomputes a layer or splits a sequence, and a CUDA
stream on which it copies the number of tokens of each expert. Its router reads a name that exists only with Transformer
Engine, and gloo cannot gather parts of unequal size. Its norm of bfloat16 gradients is rounded to bfloat16. Inside
`megatron_on_cpu()` these names mean the CPU; outside, nothing is changed, so an engine in the same process sees an
unchanged torch. Everything else goes through Megatron's own extension points.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _CudaNamesMeanCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):  # the optimizer compares with CUDA type names
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _NoRandomness:
    """Replaces the tracker of CUDA's random states, which a model without dropout does not need."""

    def fork(self, *_: Any) -> nullcontext[None]:
        return nullcontext()


def _counts_are_on_cpu(dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Replaces the copies on a CUDA stream: converts the counts to numpy arrays, which later steps expect."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(counts := getattr(dispatcher, name), Tensor):
                setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert


_gather, _reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _gather_uneven(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
    """Gather the rows of all ranks; on the way they are padded to the longest part."""
    if output_split_sizes is None or group.size() == 1:
        return _gather(input_, group, None, use_global_buffer)
    longest = max(output_split_sizes)
    padded = input_.new_zeros(longest, *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in output_split_sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, output_split_sizes, strict=True)])


def _reduce_scatter_uneven(
    input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> Any:
    """Return this rank's rows of the sum over all ranks."""
    if input_split_sizes is None or group.size() == 1:
        return _reduce_scatter(input_, group, None, use_global_buffer)
    total = input_.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.split(input_split_sizes)[group.rank()].contiguous()


_norm = clip_grads.l2_norm_impl


def _norm_in_float32(chunk_size: int, flag: Tensor, lists: list[list[Tensor]], *arguments: Any) -> Any:
    """Replaces torch's norm of each gradient, which has the gradient's dtype; a GPU's kernel adds in float32."""
    return _norm(chunk_size, flag, [[gradient.float() for gradient in gradients] for gradients in lists], *arguments)


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Make CUDA's names mean the CPU for calls into Megatron Core; does nothing where CUDA exists."""
    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "current_stream", lambda *args: None),  # 0.19 waits for CUDA graphs
        mock.patch.object(torch.cuda, "synchronize", lambda *args: None),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        mock.patch.object(
            random, "_set_cuda_rng_state", lambda *args, **kwargs: None
        ),  # Megatron also sets the CPU's state
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", _NoRandomness),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", object()),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _counts_are_on_cpu),
        mock.patch.object(clip_grads, "l2_norm_impl", _norm_in_float32),
        mock.patch.object(mappings, "_gather_along_first_dim", _gather_uneven),
        mock.patch.object(mappings, "_reduce_scatter_along_first_dim", _reduce_scatter_uneven),
        _CudaNamesMeanCpu(),
    ):
        yield
