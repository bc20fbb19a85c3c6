"""The mount of a container in which a folder lies."""

import posixpath
from collections.abc import Iterable


def mount_of(folder: str, mounts: Iterable[str]) -> str | None:
    """Return the innermost mount that is or contains `folder`; None if there is none. All paths are normalized."""
    absolute = [path for path in mounts if path.startswith("/") and folder.startswith("/")]
    return max((path for path in absolute if posixpath.commonpath([folder, path]) == path), key=len, default=None)
