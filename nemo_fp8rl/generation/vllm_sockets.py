"""The folder of vLLM's sockets: one of this process's own, which other users cannot enter.

vLLM binds them in the folder for temporary files and leaves most of their files there, also where an engine ends in
order, two or more an engine.
"""

import logging
import os
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX = "fp8rl_"
LONGEST = 107 - len("/") - 36
"""Bytes of a folder in which vLLM, which names sockets by UUIDs, can bind one: Linux has 107 for a socket's path."""


@cache
def folder() -> Path:
    """The same for all engines of this process: vLLM keeps what it has read of the environment."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(6)}"


def make_folder() -> None:
    """Create the folder and tell vLLM of it, before that is imported. What the user has set stays; what was inherited
    of another process is that one's, and may be gone or on another machine. Where the path would be too long, vLLM's
    own choice stays.
    """
    given = os.environ.get(VARIABLE)
    if given is not None and not Path(given).name.startswith(PREFIX):
        return
    if len(os.fsencode(folder())) > LONGEST:
        os.environ.pop(VARIABLE, None)
        text = "vLLM's sockets are in %s itself, where others may reach them: its path is too long; set another TMPDIR"
        logging.getLogger(__name__).warning(text, folder().parent)
        return
    os.environ[VARIABLE] = str(folder())
    folder().mkdir(mode=0o700, exist_ok=True)


def remove_folder() -> None:
    """Remove the folder with all that is in it, after an engine's end; what is connected stays so. Processes that this
    one starts later bind no sockets there.
    """
    shutil.rmtree(folder(), ignore_errors=True)
    if os.environ.get(VARIABLE) == str(folder()):
        del os.environ[VARIABLE]
