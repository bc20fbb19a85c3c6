"""The folder of vLLM's sockets: one of this process's own, which other users cannot enter.

vLLM binds them in the folder for temporary files and leaves most of their files there, also where an engine ends in
order, two or more an engine.
"""

import os
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX = "fp8rl_"


@cache
def folder() -> Path:
    """Its path, the same for all engines of this process: vLLM keeps what it has read of the environment."""
    return (
        Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(6)}"
    )  # short: a socket's path has at most 107 bytes


def make_folder() -> None:
    """Make it and tell vLLM of it, before that is imported. What the user has set stays; what was inherited of another
    process is that one's, and may be gone or on another machine.
    """
    given = os.environ.get(VARIABLE)
    if given is None or Path(given).name.startswith(PREFIX):
        os.environ[VARIABLE] = str(folder())
        folder().mkdir(mode=0o700, exist_ok=True)


def remove_folder() -> None:
    """Remove it with all that is in it, after an engine's end; what is connected stays so."""
    shutil.rmtree(folder(), ignore_errors=True)
