"""The machine in a line: what seconds, and a matmul's last bits, depend on."""

import os
import platform
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def machine() -> str:
    """Such as `x86_64, 2 CPUs, Intel(R) Xeon(R) Processor, AMX`; without what is not known."""
    return ", ".join(filter(None, (platform.machine(), f"{os.cpu_count()} CPUs", _model(), _instructions())))


def _model() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(names, platform.processor()).split())


def _instructions() -> str:
    """The first that there is of those by which libraries choose how to add up a matmul."""
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 BF16"
    return "AVX-512" if torch.cpu._is_avx512_supported() else ""
