import sys

import pytest

from nemo_fp8rl.refit.transport import cuda_ipc
from tests.refit import fake_cuda_runtime


@pytest.fixture(autouse=True)
def cuda_runtime(monkeypatch, request):
    """What the transport `cuda_ipc` finds where a test does not ask for a GPU; far processes have the same."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setitem(sys.modules, fake_cuda_runtime.NAME, fake_cuda_runtime)
        monkeypatch.setattr(cuda_ipc, "DEVICE_TYPE", "cpu")
    return fake_cuda_runtime
