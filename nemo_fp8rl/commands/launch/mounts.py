"""Which of the mounts of a container holds a folder."""

import posixpath
from collections.abc import Iterable


def mount_of(folder: str, mounts: Iterable[str]) -> str | None:
    """The innermost of these paths that `folder` is below, or is; None of one that is not absolute. All normalized."""
    absolute = [path for path in mounts if path.startswith("/") and folder.startswith("/")]
    return max((path for path in absolute if posixpath.commonpath([folder, path]) == path), key=len, default=None)
