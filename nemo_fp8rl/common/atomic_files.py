"""Files and folders that are there whole or not at all, whatever kills their writer."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nemo_fp8rl.common.errors import UserError

LOCK = ".lock"
"""The file in a folder by which it is locked. NFS tells other nodes of locks on files, and of none on folders."""
A_LOOK = 0.5
"""Seconds that a look at a lock (`is_locked`) may hold it."""


def write_atomically(path: Path, text: str) -> None:
    """Raises OSError; what was there before stays then, and what was begun is removed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path, otherwise: str) -> Iterator[int]:
    """One process a folder. A descriptor; the lock lasts until every process that has it has closed it, or has ended.

    Raises UserError(otherwise) where it is taken, for longer than `is_locked` takes to see whether it is, and OSError.
    """
    guard, last = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + A_LOOK
    try:
        while True:
            try:
                fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > last:
                    if isinstance(error, BlockingIOError):
                        raise UserError(otherwise) from None
                    raise
                time.sleep(A_LOOK / 10)
        yield guard
    finally:
        os.close(guard)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        guard = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(guard, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a filesystem without locks
        return False
    finally:
        os.close(guard)
    return False


def check_output(output: Path) -> None:
    """Make the folder that `output` is to be in. Raises UserError where `output` holds something, or cannot be made."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--output {output} exists already; give a new folder, nothing is overwritten")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be made ({error}); give another folder") from None
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {output.parent} cannot be written to; give another folder")


@contextmanager
def new_folder(output: Path, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[Path]:
    """A folder beside `output` that takes its name when all in it is on disk, and goes when that fails.

    errors: what a disk that does not take it raises. Raises UserError for one of these, and while another process works
    on the same `output`.
    """
    partial = output.with_name(f".{output.name}.partial")
    with ExitStack() as opened:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            taken = f"another process works in {partial}; wait for it or give another folder"
            opened.enter_context(locked(partial, taken))
        except OSError as error:
            raise UserError(f"{output} cannot be written ({error}); give another folder") from None
        try:
            for leftover in (path for path in partial.iterdir() if path.name != LOCK):  # of one that was killed
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
            (partial / LOCK).unlink()
            for path in (*partial.rglob("*"), partial):
                sync(path)
            os.rename(partial, output)
            sync(output.parent)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, errors):
                raise UserError(f"{output} cannot be written ({error}); make room or give another folder") from None
            raise
