"""A folder for sockets whose path is short enough: Linux has 107 bytes for it, and schedulers set a longer TMPDIR."""

import os
import tempfile
from pathlib import Path

from nemo_fp8rl.common.errors import UserError

LONGEST_PATH = 107


def short_folder(longest: int) -> Path:
    """Return the folder for temporary files, or, where its path is too long, another one for them.

    longest: bytes that the folder's path may have
    Raises:  UserError if no such folder can be written
    """
    usual = tempfile.gettempdir()
    candidates = (usual, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp", "/dev/shm")
    for folder in filter(None, candidates):
        if len(os.fsencode(folder)) <= longest and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder)
    raise UserError(
        f"TMPDIR={usual} is longer than the {longest} bytes that a socket's path leaves, and /tmp cannot be written: "
        "set TMPDIR to a shorter folder"
    )
