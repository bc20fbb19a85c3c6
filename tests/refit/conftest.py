import sys

import pytest

from nemo_fp8rl.refit.transport import cuda_memory
from tests.refit.transport import fake_cuda_runtime


@pytest.fixture(autouse=True)
def cuda_runtime(monkeypatch, request):
    """The CUDA runtime that transports import: a fake, except in tests marked `gpu`. Remote processes have the same."""
    if request.node.get_closest_marker("gpu") is None:
        for name in (fake_cuda_runtime.NAME, fake_cuda_runtime.DRIVER):
            monkeypatch.setitem(sys.modules, name, fake_cuda_runtime)
        monkeypatch.setattr(cuda_memory, "DEVICE_TYPE", "cpu")
    return fake_cuda_runtime
