"""The folder of vLLM's sockets: each process has one, which other users cannot enter.

By default vLLM binds its sockets in the folder for temporary files and leaves most of their files there, two or more
per engine, even after a regular end.
"""

import os
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers.socket_folder import LONGEST_PATH, short_folder

VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX = "fp8rl_"
MAX_FOLDER_BYTES = LONGEST_PATH - len("/") - 36
"""Maximum bytes of the folder's path: vLLM names sockets by UUIDs."""


@cache
def folder() -> Path:
    """Return the folder. It is the same for all engines of this process: vLLM reads the environment once."""
    name = f"{PREFIX}{secrets.token_hex(6)}"
    return short_folder(MAX_FOLDER_BYTES - len("/") - len(name)) / name


def make_folder() -> None:
    """Create the folder and name it to vLLM; call it before vLLM is imported.

    A folder that the user has set stays. A folder inherited from another process is replaced: it may be gone, or on
    another machine.
    Raises: UserError if the user's folder has a longer path than a socket may have
    """
    current = os.environ.get(VARIABLE)
    if current is None or Path(current).name.startswith(PREFIX):
        os.environ[VARIABLE] = str(folder())
        folder().mkdir(mode=0o700, exist_ok=True)
    elif len(os.fsencode(current)) > MAX_FOLDER_BYTES:
        raise UserError(
            f"{VARIABLE}={current}: vLLM's sockets are below it, and its path has more than {MAX_FOLDER_BYTES} bytes; "
            "unset it, or give a shorter folder"
        )


def shorten_default() -> None:
    """Name vLLM a shorter folder where its default, the folder for temporary files, is too long for sockets.

    For engines whose process this package does not set up; their nodes have the folder, too.
    """
    if VARIABLE not in os.environ and len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES:
        os.environ[VARIABLE] = str(short_folder(MAX_FOLDER_BYTES))


def remove_folder() -> None:
    """Remove the folder with its files, after an engine's end. Open connections stay open.

    Processes that this process starts later bind no sockets there.
    """
    shutil.rmtree(folder(), ignore_errors=True)
    if os.environ.get(VARIABLE) == str(folder()):
        del os.environ[VARIABLE]
