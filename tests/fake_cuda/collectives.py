"""The backend `cuda:nccl` of a process group, as gloo on tensors of fake devices."""

from importlib.util import module_from_spec, spec_from_file_location
from sysconfig import get_paths
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.fake_cuda.build import built


def install() -> None:
    library = built("collectives", "-DTORCH_EXTENSION_NAME=fake_nccl", f"-I{get_paths()['include']}", "-ltorch_python")
    spec = spec_from_file_location("fake_nccl", library)
    assert spec is not None and spec.loader is not None
    fake_nccl = module_from_spec(spec)
    spec.loader.exec_module(fake_nccl)

    class OfFakes(type):
        def __instancecheck__(cls, backend: Any) -> bool:
            return isinstance(backend, fake_nccl.FakeNccl)

    class FakeProcessGroupNCCL(metaclass=OfFakes):
        Options = SimpleNamespace

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("fake_nccl", store), rank, size, timeout=options._timeout)
            return fake_nccl.FakeNccl(gloo)

    distributed_c10d.is_nccl_available = lambda: True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = FakeProcessGroupNCCL
