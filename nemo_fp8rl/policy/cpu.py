"""What Megatron Core 0.16 needs where no CUDA device exists, scoped to the calls into it.

Megatron names CUDA literally in places that have no setting: `torch.cuda.current_device()` for DDP buffers and
embeddings, `device="cuda"` and `'torch.cuda.FloatTensor'` in the optimizer, clip_grads.py and the log-prob kernels,
`torch.cuda.synchronize()` in timers, CUDA's random state when it recomputes a layer; its router reads a name that
exists only beside Transformer Engine. Inside `megatron_on_cpu()` those names mean the CPU; outside, nothing is changed,
so that an engine in the same process never sees it. Everything else goes through Megatron's own extension points.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
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


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Calls into Megatron Core go inside; a no-op where CUDA exists."""
    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "synchronize", lambda *args: None),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        mock.patch.object(random, "_set_cuda_rng_state", lambda *args, **kwargs: None),  # the CPU's is set beside it
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        _CudaNamesMeanCpu(),
    ):
        yield
