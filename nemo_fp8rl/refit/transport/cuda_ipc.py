"""A link between processes of one host: both map memory of the source's GPU, and no byte of a payload visits the host.

Source and sink may share a GPU, or use two GPUs that reach each other's memory, even if neither process sees the
other's GPU.
"""

import torch

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.cuda_memory import FREE_AFTER_GRACE, HANDLE, CudaMemory
from nemo_fp8rl.refit.transport.double_buffer import Receiver, Sender
from nemo_fp8rl.refit.transport.link import LinkError, ReceivingEnd, SendingEnd

ALTERNATIVES = "set nemo_fp8rl.refit.transport=shared_memory, or collective where the run has several machines"


class MappingError(LinkError):
    """The sink cannot map the source's memory. The connection is intact, so another transport may follow."""


def offer(control: Control, capacity: int, device: torch.device) -> SendingEnd:
    """Make the source's end, with buckets on its device.

    Raises: RefitError if CUDA cannot share such memory, MappingError if the sink cannot map it
    """
    try:
        cuda = CudaMemory(device)
        buckets = cuda.allocate(capacity, FREE_AFTER_GRACE)
        handle = cuda.export_handle(buckets)
    except RuntimeError as error:
        raise RefitError(
            f"no two buckets of {capacity / 2**20:.1f} MiB on {device} for another process to map ({error}): "
            f"{ALTERNATIVES}, or a smaller nemo_fp8rl.refit.bucket_bytes where memory is short"
        ) from None
    control.send_fields(handle=handle.hex())
    answer = control.receive_fields(mapped=bool, why=str)
    if not answer["mapped"]:
        raise MappingError(f"{control.peer} cannot map this rank's GPU memory ({answer['why']})")
    return Sender(control, buckets, cuda.map_allocation)


def take(control: Control, capacity: int, device: torch.device) -> ReceivingEnd | None:
    """Make the sink's end, or return None if this process cannot map the source's memory.

    The source then knows the reason, and offers another transport or ends the link.

    device: the device of this process's weights
    """
    text = control.receive_fields(handle=str)["handle"]
    try:
        handle = bytes.fromhex(text)
    except ValueError:
        handle = b""
    if len(handle) != HANDLE:
        raise LinkError(f"{control.peer} offers {text[:80]!r}, which is not a handle of GPU memory")
    try:
        buckets = CudaMemory(device).map_handle(handle, capacity)
    except RuntimeError as error:
        control.send_fields(mapped=False, why=f"on {device}: {error}")
        return None
    control.send_fields(mapped=True, why="")
    return Receiver(control, buckets, "gpu")
