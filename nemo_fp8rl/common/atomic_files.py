"""Files and folders that are either complete or absent, whatever kills their writer; locks on folders."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nemo_fp8rl.common.errors import UserError

LOCK = ".lock"
"""The file by which a folder is locked. NFS shares locks on files between nodes, but not locks on folders."""
PROBE_SECONDS = 0.5
"""`is_locked` may have the lock for so long, so `lock_folder` retries for so long."""


def write_atomically(path: Path, text: str) -> None:
    """Write the file through a temporary one. On OSError the old file stays and the temporary one is removed."""
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
def lock_folder(folder: Path, message: str) -> Iterator[int]:
    """Lock the folder for this process; yield the descriptor of the lock.

    The lock lasts until every process that inherited the descriptor has closed it or has ended.

        message:  the text of the UserError where another process has the lock
        Raises:   UserError, OSError
    """
    descriptor, deadline = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + PROBE_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    if isinstance(error, BlockingIOError):
                        raise UserError(message) from None
                    raise
                time.sleep(PROBE_SECONDS / 10)
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return True while a process has the folder's lock."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the filesystem has no locks
        return False
    finally:
        os.close(descriptor)
    return False


def check_output(output: Path) -> None:
    """Make the parent folder of `output`. Raises UserError where `output` is not empty or cannot be made."""
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
    """Yield a temporary folder beside `output`; rename it to `output` when its files are on disk, else remove it.

    errors:  exceptions that a full or broken disk raises
    Raises:  UserError for one of these errors, and while another process works on the same `output`
    """
    partial = output.with_name(f".{output.name}.partial")
    with ExitStack() as opened:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            message = f"another process works in {partial}; wait for it or give another folder"
            opened.enter_context(lock_folder(partial, message))
        except OSError as error:
            raise UserError(f"{output} cannot be written ({error}); give another folder") from None
        try:
            for leftover in (path for path in partial.iterdir() if path.name != LOCK):  # left by a killed writer
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
