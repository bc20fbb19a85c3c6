"""A description of the machine, on which run times and the roundings of kernels depend."""

import os
import platform
from collections.abc import Collection
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def machine() -> str:
    """Return a description such as `x86_64, 2 CPUs, Intel(R) Xeon(R) Processor, AMX`, without unknown parts."""
    return ", ".join(filter(None, (platform.machine(), f"{os.cpu_count()} CPUs", _model(), instructions())))


def _model() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(names, platform.processor()).split())


def instructions() -> str:
    """Return the name of the GPU; without one, the best instruction set by which libraries choose their matmul."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 BF16"
    return "AVX-512" if torch.cpu._is_avx512_supported() else ""


def describe_processors(trainer: Collection[str], engines: Collection[str]) -> str:
    """Return the instruction sets of both sides' machines in one line.

    With AMX, vLLM's kernels round differently than without it; the trainer rounds as its own machine does.
    """
    if len({*trainer, *engines}) == 1:
        return next(iter(trainer)) or "no AVX-512"
    sides = {side: names for side, names in (("trainer", trainer), ("engines", engines)) if names}
    described = (
        f"{side} {' or '.join(sorted(name or 'no AVX-512' for name in set(names)))}" for side, names in sides.items()
    )
    return ", ".join(described) + ", whose kernels may round differently"
