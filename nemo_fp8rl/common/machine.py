"""The machine in a line: what seconds, and the roundings of kernels, depend on."""

import os
import platform
from collections.abc import Collection
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def machine() -> str:
    """A description such as `x86_64, 2 CPUs, Intel(R) Xeon(R) Processor, AMX`, without what is not known."""
    return ", ".join(filter(None, (platform.machine(), f"{os.cpu_count()} CPUs", _model(), instructions())))


def _model() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(names, platform.processor()).split())


def instructions() -> str:
    """The GPU; without one, the first there is of the sets by which libraries choose how to add up a matmul."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 BF16"
    return "AVX-512" if torch.cpu._is_avx512_supported() else ""


def processors(trainer: Collection[str], engines: Collection[str]) -> str:
    """The instructions of both sides' machines in a line: with AMX vLLM's kernels round otherwise than without, and the
    trainer's rounding points are those of its own machine.
    """
    if len({*trainer, *engines}) == 1:
        return next(iter(trainer)) or "no AVX-512"
    sides = {"trainer": trainer, "engines": engines}
    described = (
        f"{side} {' or '.join(sorted(name or 'no AVX-512' for name in set(own)))}" for side, own in sides.items()
    )
    return ", ".join(described) + ", whose kernels may round differently"
