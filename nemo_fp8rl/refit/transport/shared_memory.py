"""A link between processes of one host: both map one file in /dev/shm, and no byte of a payload is copied.

The file loses its name once both have mapped it, so that nothing stays behind a process that is killed, except in the
moment between its creation and that (one round trip). It stays mapped for the link's life: the first touch of new
shared pages costs a second for a gigabyte, their reuse some hundredths of one.
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

FOLDER = Path("/dev/shm")
PREFIX = "nemo_fp8rl-"
KERNEL = Path("/proc/sys/kernel/random/boot_id")


def domain() -> str:
    """Processes with the same one have one /dev/shm: those of a machine, apart from its containers."""
    try:
        return f"{KERNEL.read_text().strip()}/{FOLDER.stat().st_dev}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"  # nobody else's


def offer(control: Control, capacity: int) -> SendingEnd:
    """The source's end. Raises RefitError where /dev/shm is too small, LinkError where the sink cannot map the file."""
    path = FOLDER / f"{PREFIX}{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise RefitError(
            f"cannot create {path} ({error.strerror}): set nemo_fp8rl.refit.transport=collective"
        ) from None
    try:
        _reserve(descriptor, BUFFERS * _stride(capacity))
        buffers = _mapped(descriptor, capacity)
        control.say(file=path.name)
        control.hear(mapped=bool)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    return Sender(control, buffers)


def take(control: Control, capacity: int) -> ReceivingEnd:
    """The sink's end. Raises LinkError where it does not see the source's file."""
    name = control.hear(file=str)["file"]
    if not re.fullmatch(rf"{PREFIX}[\w-]+", name, re.ASCII):
        raise LinkError(f"{control.other} offers {name!r}, which is no file of a link")
    try:
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise LinkError(
            f"cannot open {FOLDER / name} of {control.other} ({error.strerror}): ranks that do not share {FOLDER} need "
            "nemo_fp8rl.refit.transport=collective"
        ) from None
    try:
        if os.fstat(descriptor).st_size != BUFFERS * _stride(capacity):  # pages past the end would be a SIGBUS
            raise LinkError(f"{FOLDER / name} of {control.other} is not two buckets of {capacity} bytes")
        buffers = _mapped(descriptor, capacity)
    finally:
        os.close(descriptor)
    control.say(mapped=True)
    return Receiver(control, buffers)


def _stride(capacity: int) -> int:
    """Bytes between the buckets: each begins on a page, so that a view of any dtype is aligned."""
    return -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give the file its pages now: one that a full /dev/shm lacks later would be a SIGBUS."""
    space = os.fstatvfs(descriptor)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    try:
        if nbytes > free:  # asked before the system would fill what there is
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise RefitError(
            f"this link, one of a rank to an engine's, needs two buckets, {nbytes / 2**20:.1f} MiB, in {FOLDER}, which "
            f"has {free / 2**20:.1f} MiB free of {total / 2**20:.1f} ({error.strerror}), and all links of a process "
            "twice nemo_fp8rl.refit.bucket_bytes: make that smaller, or set nemo_fp8rl.refit.transport=collective, or "
            f"make {FOLDER} larger"
        ) from None


def _mapped(descriptor: int, capacity: int) -> list[Tensor]:
    """The two buffers. The mapping lasts as long as a tensor on it."""
    mapping = mmap.mmap(descriptor, BUFFERS * _stride(capacity))
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=capacity, offset=slot * _stride(capacity))
        for slot in range(BUFFERS)
    ]
