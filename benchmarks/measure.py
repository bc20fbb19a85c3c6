"""What the benchmarks measure with: seconds by a clock, memory, and a model of real size."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def seconds(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Of one call: wall time, or with time.thread_time the CPU's for this thread."""
    start = clock()
    call()
    return clock() - start


def wait_for_gpu() -> None:
    """Until it has done what was asked of it, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def peak_growth(call: Callable[[], Any]) -> int:
    """Bytes by which the process's peak rises above what it holds before the call (Linux: VmHWM, VmRSS)."""

    def status(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and not given back would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    kept = call()
    grown = status("VmHWM") - before
    del kept
    return grown


def trained_bytes(worker: Any) -> float:
    """Return the bytes that a trainer has for a trained parameter between steps: every memory once, without scales.

    worker:  a MegatronWorker that trains all parameters
    """
    from nemo_fp8rl.policy.optimizer.builders import optimizer_tensors

    tensors = [data for buffer in worker.offload.buffers for data in (buffer.param_data, buffer.grad_data)]
    for state in optimizer_tensors(worker.optimizer):
        tensors += [state] if state.grad is None else [state, state.grad]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel() > 1]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values()) / sum(parameter.numel() for parameter in worker.model.parameters())
