"""The folder of vLLM's sockets: each process has one, which other users cannot enter.

By default vLLM binds its sockets in the folder for temporary files and leaves most of their files there, two or more
per engine, even after a regular end.
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
MAX_FOLDER_BYTES = 107 - len("/") - 36
"""Maximum bytes of the folder's path: Linux has 107 for a socket's path, and vLLM names sockets by UUIDs."""


@cache
def folder() -> Path:
    """Return the folder. It is the same for all engines of this process: vLLM reads the environment once."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(6)}"


def make_folder() -> None:
    """Create the folder and name it to vLLM; call it before vLLM is imported.

    A folder that the user has set stays. A folder inherited from another process is replaced: it may be gone, or on
    another machine. Where the path would be too long, vLLM's default stays.
    """
    current = os.environ.get(VARIABLE)
    if current is not None and not Path(current).name.startswith(PREFIX):
        return
    if len(os.fsencode(folder())) > MAX_FOLDER_BYTES:
        os.environ.pop(VARIABLE, None)
        text = "vLLM's sockets are in %s itself, where others may reach them: its path is too long; set another TMPDIR"
        logging.getLogger(__name__).warning(text, folder().parent)
        return
    os.environ[VARIABLE] = str(folder())
    folder().mkdir(mode=0o700, exist_ok=True)


def remove_folder() -> None:
    """Remove the folder with its files, after an engine's end. Open connections stay open.

    Processes that this process starts later bind no sockets there.
    """
    shutil.rmtree(folder(), ignore_errors=True)
    if os.environ.get(VARIABLE) == str(folder()):
        del os.environ[VARIABLE]
