"""pytest plugin that runs NeMo RL's own tests of its loss on the class named by LOSS_UNDER_TEST (module:class).

The tests need a GPU; here `cuda` means the CPU. The class replaces ClippedPGLossFn before the tests are collected.
"""

import importlib
import os
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nemo_fp8rl.nemo_rl.compat import prepare

prepare()

from nemo_rl.algorithms import loss  # noqa: E402
from nemo_rl.algorithms.loss import loss_functions  # noqa: E402

MODULE, _, NAME = os.environ["LOSS_UNDER_TEST"].partition(":")
CALLS = [0]


class Counted(getattr(importlib.import_module(MODULE), NAME)):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS[0] += 1
        return super().__call__(*args, **kwargs)


loss.ClippedPGLossFn = loss_functions.ClippedPGLossFn = Counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"calls of the loss under test: {CALLS[0]}")


class CpuForCuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        return func(*map(on_cpu, args), **{name: on_cpu(value) for name, value in (kwargs or {}).items()})


def on_cpu(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda else value


@pytest.fixture(autouse=True)
def cpu_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with CpuForCuda():
        yield
