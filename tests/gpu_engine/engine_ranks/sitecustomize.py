"""For the processes of an engine's ranks: Python imports this module at its start, from a folder on PYTHONPATH.

They get what `tests/gpu_engine/plugin.py` gives to the process of the tests, before vLLM asks for Triton. What is fake
besides: vLLM's sum over ranks in shared memory, which cuts float32 off on a CPU without AVX-512 BF16, is gloo's.
"""

import sys
from typing import Any


def fake_all_reduce(communicator: Any, x: Any) -> Any:
    torch.distributed.all_reduce(x, group=communicator.device_group)
    return x


if "--multiprocessing-fork" in sys.orig_argv:  # not the helpers of multiprocessing
    import torch

    from tests.gpu_engine import plugin

    plugin.pytest_sessionstart()
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_reduce = fake_all_reduce
