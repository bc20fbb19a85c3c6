"""Files and folders that are either complete or absent, whatever kills their writer; locks on folders."""

import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from nemo_fp8rl.common.errors import UserError

LOCK = ".lock"
"""The file by which a folder is locked. NFS shares locks on files between nodes, but not locks on folders."""
LOCKED = (errno.EAGAIN, errno.EACCES)
"""Error numbers by which another process has the lock; any other says that the filesystem has no locks."""
NOT_SYNCED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOTTY, errno.EPERM, errno.EACCES, errno.EBADF)
"""Error numbers of filesystems that cannot sync a file or a folder. A full or broken disk has others."""
FULL, FORBIDDEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (errno.EACCES, errno.EPERM)
OS_ERROR = re.compile(r"(?:os error|Errno) (\d+)")
ANOTHER = "give another folder"
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
    """Write a file, or the names in a folder, to the disk, as far as the filesystem can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        if path.is_dir():  # a folder that cannot be opened cannot be synced
            return
        raise
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Write what is open under this number to the disk, as far as the filesystem can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SYNCED:
            raise


def advice(error: Exception, alternative: str = "") -> str:
    """Return what the user can do about an error of a disk.

    error:        an OSError, or one that has the text of it, as safetensors raises
    alternative:  what helps in any case, such as "give another folder"
    """
    quoted = OS_ERROR.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(quoted[1]) if quoted else None
    first = "make room" if number in FULL else "allow writing there" if number in FORBIDDEN else ""
    return ", or ".join(filter(None, (first, alternative))) or "mend that"


def check_checkpoint_folder(folder: Path) -> None:
    """Do in small what writing a checkpoint does: make a folder with a file, sync it, rename it, remove it.

    Raises: OSError where the filesystem cannot do that
    """
    probe, renamed = folder / f".partial_probe-{os.getpid()}", folder / f".partial_probed-{os.getpid()}"
    try:
        probe.mkdir()
        (probe / "file").write_text("{}\n")
        for path in (probe / "file", probe):
            sync(path)
        os.rename(probe / "file", probe / "renamed")
        os.rename(probe, renamed)
        sync(folder)
    finally:
        for path in (probe, renamed):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def lock_folder(folder: Path, message: str) -> Iterator[int]:
    """Lock the folder for this process; yield the descriptor of the lock.

    The lock lasts until every process that inherited the descriptor has closed it or has ended. A filesystem without
    locks (Lustre mounted without them, NFS without its lock daemon, some FUSE filesystems) is said, and not refused.

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
                if error.errno not in LOCKED:
                    text = "%s is on a filesystem without locks (%s): nothing keeps a second process out of it"
                    logging.getLogger(__name__).warning(text, folder, error.strerror)
                    break
                if time.monotonic() > deadline:
                    raise UserError(message) from None
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
    except OSError as error:
        return error.errno in LOCKED
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
            raise UserError(f"{output} cannot be written ({error}); {advice(error, ANOTHER)}") from None
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
                raise UserError(f"{output} cannot be written ({error}); {advice(error, ANOTHER)}") from None
            raise
