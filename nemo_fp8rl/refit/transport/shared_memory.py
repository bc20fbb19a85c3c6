"""A link between processes of one host: both map one file in /dev/shm, and no byte of a payload is copied.

The file loses its name when both processes have mapped it, so that a killed process leaves nothing behind, except in
the moment between the file's creation and that (one round trip). The file stays mapped for the link's life: the first
touch of new shared pages costs a second per gigabyte, their reuse some hundredths of a second.
"""

import errno
import mmap
import os
import re
import secrets
import socket
from pathlib import Path

import torch
from torch import Tensor

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.double_buffer import Receiver, Sender
from nemo_fp8rl.refit.transport.link import BUFFERS, LinkError, ReceivingEnd, SendingEnd
from nemo_fp8rl.refit.transport.shared_file import map_file

FOLDER = Path("/dev/shm")
PREFIX = "nemo_fp8rl-"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def domain() -> str:
    """Return the name of this process's domain: processes with the same domain share one /dev/shm.

    It is the machine's, except that a container with a /dev/shm of its own has its own domain.
    """
    try:
        return f"{BOOT_ID.read_text().strip()}/{FOLDER.stat().st_dev}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # a domain of this process alone


def offer(control: Control, capacity: int) -> SendingEnd:
    """Make the source's end.

    Raises: RefitError if /dev/shm is too small, LinkError if the sink cannot map the file
    """
    path = FOLDER / f"{PREFIX}{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise RefitError(
            f"cannot create {path} ({error.strerror}): set nemo_fp8rl.refit.transport=collective"
        ) from None
    try:
        _reserve_pages(descriptor, BUFFERS * _stride(capacity))
        buffers = _map_buffers(descriptor, capacity)
        control.send_fields(file=path.name)
        control.receive_fields(mapped=bool)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    return Sender(control, buffers, map_file)


def take(control: Control, capacity: int) -> ReceivingEnd:
    """Make the sink's end. Raises LinkError if this process does not see the source's file."""
    name = control.receive_fields(file=str)["file"]
    if not re.fullmatch(rf"{PREFIX}[\w-]+", name, re.ASCII):
        raise LinkError(f"{control.peer} offers {name!r}, which is not the file of a link")
    try:
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise LinkError(
            f"cannot open {FOLDER / name} of {control.peer} ({error.strerror}): ranks that do not share {FOLDER} need "
            "nemo_fp8rl.refit.transport=collective"
        ) from None
    try:
        if os.fstat(descriptor).st_size != BUFFERS * _stride(capacity):  # pages past the end would be a SIGBUS
            raise LinkError(f"{FOLDER / name} of {control.peer} is not two buckets of {capacity} bytes")
        buffers = _map_buffers(descriptor, capacity)
    finally:
        os.close(descriptor)
    control.send_fields(mapped=True)
    return Receiver(control, buffers, "host")


def _stride(capacity: int) -> int:
    """Return the bytes between the buckets: each begins on a page, so that a view of any dtype is aligned."""
    return -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserve_pages(descriptor: int, nbytes: int) -> None:
    """Allocate the file's pages now: a page that a full /dev/shm lacks later would be a SIGBUS."""
    space = os.fstatvfs(descriptor)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    try:
        if nbytes > free:  # checked before the system fills the space that is there
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise RefitError(
            f"the link of a trainer rank to an engine rank needs two buckets, {nbytes / 2**20:.1f} MiB, in {FOLDER}, "
            f"which has {free / 2**20:.1f} MiB free of {total / 2**20:.1f} ({error.strerror}); all links of a process "
            "need twice nemo_fp8rl.refit.bucket_bytes: make that smaller, or set "
            f"nemo_fp8rl.refit.transport=collective, or make {FOLDER} larger"
        ) from None


def _map_buffers(descriptor: int, capacity: int) -> list[Tensor]:
    """Return the two buffers. The mapping lasts as long as a tensor that uses it."""
    mapping = mmap.mmap(descriptor, BUFFERS * _stride(capacity))
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=capacity, offset=slot * _stride(capacity))
        for slot in range(BUFFERS)
    ]
