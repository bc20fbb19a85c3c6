"""The decorators of loops that numba compiles.

numba stores compiled code beside the source, in the user's cache folder, or in NUMBA_CACHE_DIR. Where none of them can
be written (a read-only container, a full disk), it raises an error; here every process then compiles a loop again.
A folder for all users, such as /tmp, is no place for it: numba unpickles what it finds there.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba as nb
from numba.core.caching import FunctionCache, IndexDataCacheFile

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}  # fastmath stays off: it changes bits


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function; a disk that refuses the code, or has lost it, costs the time of a compilation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        folder = Path(function.__code__.co_filename).parent
        files = [(file.name, file.stat().st_mtime, file.stat().st_size) for file in sorted(folder.glob("*.py"))]
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, source_stamp=tuple(files))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError as error:
            _say_uncached(error.strerror or str(error))
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say_uncached(error.strerror or str(error))


def jit(function: Callable[..., Any]) -> Any:
    """Compile a loop at its first call, with numba's cache on disk where there is one."""
    dispatcher = nb.njit(**OPTIONS)(function)
    try:
        dispatcher._cache = _Cache(function)  # what njit(cache=True) does
    except RuntimeError:
        _say_uncached("neither the package's folder nor the user's cache folder can be written")
    return dispatcher


@functools.cache
def _say_uncached(reason: str) -> None:
    """Say it once in a process, for each reason."""
    text = (
        "compiled loops cannot be stored (%s): every process compiles them again, for seconds; set NUMBA_CACHE_DIR to "
    )
    logging.getLogger(__name__).warning(text + "a folder of yours that can be written", reason)
