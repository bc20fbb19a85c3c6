"""A link between processes of one host: both map memory of the source's GPU, and no byte of a payload visits the host.

Source and sink may share a GPU or have two that reach each other's memory, whether or not either sees the other's.
"""

import torch

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.cuda_memory import HANDLE, LATER, CudaMemory
from nemo_fp8rl.refit.transport.double_buffer import Receiver, Sender
from nemo_fp8rl.refit.transport.link import LinkError, ReceivingEnd, SendingEnd

ELSE = "set nemo_fp8rl.refit.transport=shared_memory, or collective where the run has several machines"


class Unmapped(LinkError):
    """The sink said that it cannot map the source's memory. The connection stands: both may try another way."""


def offer(control: Control, capacity: int, device: torch.device) -> SendingEnd:
    """The source's end; the buckets are on its device. Raises RefitError where CUDA cannot share such memory, Unmapped
    where the sink cannot map it.
    """
    try:
        cuda = CudaMemory(device)
        buckets = cuda.allocated(capacity, LATER)
        handle = cuda.handle(buckets)
    except RuntimeError as error:
        raise RefitError(
            f"no two buckets of {capacity / 2**20:.1f} MiB on {device} for another process to map ({error}): {ELSE}, "
            "or a smaller nemo_fp8rl.refit.bucket_bytes where memory is short"
        ) from None
    control.say(handle=handle.hex())
    answer = control.hear(mapped=bool, why=str)
    if not answer["mapped"]:
        raise Unmapped(f"{control.other} cannot map this rank's GPU memory ({answer['why']})")
    return Sender(control, buckets)


def take(control: Control, capacity: int, device: torch.device) -> ReceivingEnd | None:
    """The sink's end. device: where its weights are. None where that cannot map the source's memory: the source has
    heard why, and offers another way or ends the link.
    """
    text = control.hear(handle=str)["handle"]
    try:
        handle = bytes.fromhex(text)
    except ValueError:
        handle = b""
    if len(handle) != HANDLE:
        raise LinkError(f"{control.other} offers {text[:80]!r}, which is no handle of a GPU's memory")
    try:
        buckets = CudaMemory(device).mapped(handle, capacity)
    except RuntimeError as error:
        control.say(mapped=False, why=f"on {device}: {error}")
        return None
    control.say(mapped=True, why="")
    return Receiver(control, buckets)
