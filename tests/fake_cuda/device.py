"""A CUDA device on a machine that has none: real tensors on `cuda:0`, in the host's memory, with the CPU's kernels.

`device.cpp` gives torch the device: what is there and what is on the CPU are kept apart by torch's own checks and by
those of the operators that CUDA refuses. What is here are the Python names of `torch.cuda`, which a CPU build lacks.
Nothing says how fast a GPU is, nor what its kernels round; streams run in order.
"""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

from tests.fake_cuda.build import built

NAME = "fake CUDA device"
CAPABILITY = (9, 0)
MEMORY = 64 << 30


def install() -> None:
    """Install the device; call it before torch is imported, which queries the devices once."""
    assert "torch" not in sys.modules
    ctypes.CDLL(str(built("device")))
    import torch

    from tests.fake_cuda import collectives
    from tests.fake_cuda.streams import FakeEvent, FakeStream

    stream = FakeStream()
    for name, answer in {**ANSWERS, "current_stream": stream, "default_stream": stream, "stream": stream}.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, lambda *_, answer=answer, **__: answer)
    allocated = torch.ops.fake_cuda.memory_allocated
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_, **__: allocated())
    torch.cuda.mem_get_info = lambda *_: (MEMORY - allocated(), MEMORY)
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.Stream, torch.cuda.Event = FakeStream, FakeEvent
    torch.cuda.default_generators = (torch.default_generator,)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.version.cuda = "13.0"
    _let_storages_resize()
    collectives.install()


ANSWERS: dict[str, Any] = {
    "_lazy_init": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    "_sleep": None,
    "current_device": 0,
    "device_count": 4,
    "empty_cache": None,
    "get_device_capability": CAPABILITY,
    "get_device_name": NAME,
    "get_device_properties": SimpleNamespace(
        name=NAME, major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, total_memory=MEMORY
    ),
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
    "synchronize": None,
}
"""The constant answers of torch.cuda's functions; every process uses the first device."""


def _let_storages_resize() -> None:
    import torch

    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, nbytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, nbytes)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        torch.ops.fake_cuda.resize_storage(whole, nbytes)
        return storage

    torch.UntypedStorage.resize_ = resize_
