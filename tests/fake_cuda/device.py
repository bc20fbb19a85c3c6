"""A CUDA device on a machine that has none: real tensors on `cuda:0`, in the host's memory, with the CPU's kernels.

`device.cpp` gives torch the device: what is there and what is on the CPU are kept apart by torch's own checks and by
those of the operators that CUDA refuses. What is here are the Python names of `torch.cuda`, which a CPU build lacks.
Nothing says how fast a GPU is, nor what its kernels round; streams run in order.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from sysconfig import get_paths
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
NAME = "fake CUDA device"
CAPABILITY = (9, 0)
MEMORY = 64 << 30


def built(name: str, *flags: str) -> Path:
    """`name`.cpp for this torch, compiled once. Needs a C++ compiler and Python's headers."""
    spec = find_spec("torch")
    assert spec is not None
    torch = Path(next(iter(spec.submodule_search_locations or ())))
    source = FOLDER / f"{name}.cpp"
    of = hashlib.sha256(source.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:12]
    library = Path(sys.prefix, "fake-cuda", f"{name}-{of}.so")
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-w", str(source), "-o", str(made), *flags]
        command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"], check=True)
        made.rename(library)
    return library


def install() -> None:
    """Before torch is imported, which asks once what devices there are."""
    assert "torch" not in sys.modules
    ctypes.CDLL(str(built("device")))
    import torch
    from torch import Tensor

    ops = torch.ops.fake_cuda

    class FakeStream:
        cuda_stream = 0
        device = torch.device("cuda", 0)

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> "FakeStream":
            return self

        def __exit__(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def wait_stream(self, _: Any) -> None: ...
        def wait_event(self, _: Any) -> None: ...
        def record_event(self, event: Any = None) -> Any:
            return event or FakeEvent()

        def query(self) -> bool:
            return True

    class FakeEvent:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def wait(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, _: Any) -> float:
            return 0.0

    stream = FakeStream()
    properties = SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, total_memory=MEMORY
    )
    answers = {
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_sleep": None,
        "current_device": 0,
        "current_stream": stream,
        "default_stream": stream,
        "device_count": 1,
        "empty_cache": None,
        "get_device_capability": CAPABILITY,
        "get_device_name": NAME,
        "get_device_properties": properties,
        "init": None,
        "is_available": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "is_initialized": True,
        "manual_seed": None,
        "manual_seed_all": None,
        "reset_peak_memory_stats": None,
        "set_device": None,
        "set_rng_state": None,
        "set_stream": None,
        "stream": stream,
        "synchronize": None,
    }
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, lambda *_, answer=answer, **__: answer)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_, **__: ops.memory_allocated())
    torch.cuda.mem_get_info = lambda *_: (MEMORY - ops.memory_allocated(), MEMORY)
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.Stream, torch.cuda.Event = FakeStream, FakeEvent
    torch.cuda.default_generators = (torch.default_generator,)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.version.cuda = "13.0"
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, nbytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, nbytes)
        whole: Tensor = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        ops.resize_storage(whole, nbytes)
        return storage

    torch.UntypedStorage.resize_ = resize_
    _install_collectives()


def _install_collectives() -> None:
    """`cuda:nccl` in a process group: gloo, for tensors on fake devices."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

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
