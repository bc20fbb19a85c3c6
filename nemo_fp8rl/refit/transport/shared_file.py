"""Host memory that processes of a machine share, as a file without a name: it is gone when the last of them ends.

The process that made it has it open, and tells others where, over a connection on which both have proved the run's
token; as any open file, the user's other processes could find it in /proc. The size of /dev/shm does not bound it.
"""

import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

NAME = "nemo_fp8rl"


class SharedFile:
    """Memory that other processes can map with `map_file`."""

    def __init__(self, nbytes: int) -> None:
        self._descriptor = os.memfd_create(NAME)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.ftruncate(self._descriptor, nbytes)
        self._mapping = mmap.mmap(self._descriptor, nbytes)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()

    @property
    def fields(self) -> dict[str, int]:
        """The numbers that `map_file` needs, for JSON."""
        status = os.fstat(self._descriptor)
        return {
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "device": status.st_dev,
            "inode": status.st_ino,
            "nbytes": status.st_size,
        }

    def take(self, start: int, nbytes: int) -> Tensor:
        """Return memory, uint8 [nbytes], whose pages are there: one that is missing later would be a SIGBUS.

        start:  a multiple of `mmap.PAGESIZE`
        Raises: OSError where the system has no memory for it
        """
        os.posix_fallocate(self._descriptor, start, nbytes)
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=start)

    def free(self, start: int, nbytes: int) -> None:
        """Give pages back, even if other processes map them; all of them then read zeros there.

        start, nbytes: multiples of `mmap.PAGESIZE`
        """
        self._mapping.madvise(mmap.MADV_REMOVE, start, nbytes)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the byte at which a tensor begins; None for a tensor in other memory."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < len(self._mapping) else None


def map_file(fields: dict[str, Any]) -> Tensor:
    """Return the memory, uint8 [nbytes], of a `SharedFile` of another process; the tensor keeps it mapped.

    fields: of that file
    Raises: OSError where this process does not see that very file
    """
    path = f"/proc/{int(fields['process'])}/fd/{int(fields['descriptor'])}"
    if not os.readlink(path).startswith(f"/memfd:{NAME} "):
        raise FileNotFoundError(f"{path} is no memory of nemo_fp8rl")  # and to open it could have effects
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status, expected = os.fstat(descriptor), tuple(int(fields[name]) for name in ("device", "inode", "nbytes"))
        if (status.st_dev, status.st_ino, status.st_size) != expected:
            raise FileNotFoundError(f"{path} is another file than was offered")
        return torch.frombuffer(mmap.mmap(descriptor, status.st_size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
