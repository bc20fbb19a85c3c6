"""The places that an engine rank offers to its sources: its tensors in memory that other processes can map.

Only a load opens places, so a source writes nothing while the engine generates or sleeps. Each load first looks whether
the tensors are where they were when the offer was made; if they have moved, the offer is made anew.

Tensors in host memory are moved, one by one, into a `SharedFile`. A file belongs to the links to which it was offered:
once one of them is replaced, the tensors are moved into a new file, so that a source which lost its link, and does not
know it yet, writes into memory that nothing reads. Memory of a GPU cannot move, because CUDA graphs know the addresses.
There a refit waits until every trainer rank has ended its push before it makes a link again.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.refit.transport.cuda_memory import CudaMemory
from nemo_fp8rl.refit.transport.link import ReceivingEnd
from nemo_fp8rl.refit.transport.places import Contents, Location, Offer, Places, Reach
from nemo_fp8rl.refit.transport.shared_file import SharedFile

logger = logging.getLogger(__name__)


class OfferedPlaces:
    """The places of one engine rank. is_withdrawn: nothing is offered any more."""

    def __init__(self) -> None:
        self.is_withdrawn = False
        self._offer: Offer | None = None
        self._file: SharedFile | None = None
        self._ends: list[weakref.ref[ReceivingEnd]] = []  # to which the offer was made
        self._tensors: Sequence[Tensor] = ()
        self._pointers: list[int] = []

    def open(
        self,
        ends: Sequence[ReceivingEnd],
        version: int,
        tensors: Sequence[Tensor],
        contents: Callable[[], Contents],
    ) -> Places | None:
        """Open the places for the load of a version that begins, and return them; None where none are opened.

        ends:     of all links of this rank
        tensors:  the tensors that sources may write; the `data` of one on the host may move, so it shares its memory
                  with no other tensor
        contents: returns the memory of what is written in place, once the tensors are where they stay
        """
        present = {id(end) for end in ends}
        if self._file is not None and any(id(end()) not in present for end in self._ends):
            self._move(self._tensors)
            self._offer, self._pointers = None, _pointers(self._tensors)
        offer = self._renew(ends, tensors, contents) if tensors and not self.is_withdrawn else None
        self._ends = [weakref.ref(end) for end in ends]
        for end in ends:
            end.open_places(version, offer)
        return offer.places if offer is not None else None

    def withdraw(self) -> None:
        """Offer nothing from now on: the rank frees or moves its weights between refits.

        On a host, tensors whose memory cannot be freed get other memory, without their values: those in a shared file,
        whose pages are given back, and those that a kernel of this process wrote through numpy's view.
        """
        self.is_withdrawn, self._offer = True, None
        for tensor in self._tensors:
            if not tensor.is_cuda and not tensor.untyped_storage().resizable():
                tensor.data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if self._file is not None:
            self._file.free(0, sum(map(_page_bytes, self._tensors)))
            self._file = None

    def _renew(
        self, ends: Sequence[ReceivingEnd], tensors: Sequence[Tensor], contents: Callable[[], Contents]
    ) -> Offer | None:
        """Return the offer to these ends: the last one where nothing has changed."""
        reach = next((end.reach for end in ends if end.reach is not None), None)
        if reach is None:
            return None
        have_moved = _pointers(tensors) != self._pointers
        if self._offer is None or self._offer.reach != reach or have_moved:
            if reach == "host" and not tensors[0].is_cuda and (have_moved or self._file is None):
                self._move(tensors)
            self._offer = self._make_offer(reach, contents(), tensors[0].device)
            self._tensors, self._pointers = tensors, _pointers(tensors)
        return self._offer

    def _move(self, tensors: Sequence[Tensor]) -> None:
        """Move the tensors into a new file. One for which there is no memory gets, or keeps, memory of its own."""
        old, start, shortage = self._file, 0, ""
        try:
            self._file = SharedFile(sum(map(_page_bytes, tensors)))
        except OSError as error:
            self._file, shortage = None, str(error)
        for tensor in tensors:
            before = old.offset_of(tensor) if old is not None else None
            try:
                if self._file is not None:
                    memory = self._file.take(start, tensor.nbytes).view(tensor.dtype)
                    tensor.data = memory.as_strided(tensor.shape, tensor.stride()).copy_(tensor.data)
            except OSError as error:
                shortage = str(error)
            if old is not None and before is not None:
                if old.offset_of(tensor) is not None:
                    tensor.data = tensor.data.clone()
                old.free(before, _page_bytes(tensor))
            start += _page_bytes(tensor)
        if shortage:
            logger.warning("weights of this engine go through buckets: no memory to share (%s)", shortage)

    def _make_offer(self, reach: Reach, contents: Contents, device: torch.device) -> Offer:
        memory: list[Any] = []
        if reach == "process":
            return Offer(Places(contents), reach, memory, {})
        locate = _GpuLocations(device, memory).find if reach == "gpu" else self._locate_in_file
        if reach == "host" and self._file is not None:
            memory.append(self._file.fields)
        found = {name: [locate(tensor) for tensor in content.tensors] for name, (_, content) in contents.items()}
        where = {
            name: [location for location in locations if location is not None]
            for name, locations in found.items()
            if None not in locations
        }
        return Offer(Places({name: contents[name] for name in where}), reach, memory, where)

    def _locate_in_file(self, tensor: Tensor) -> Location | None:
        start = self._file.offset_of(tensor) if self._file is not None else None
        return None if start is None else (0, start)


class _GpuLocations:
    """Finds the allocations of tensors on a GPU.

    memory: gets what other processes need to map each allocation
    """

    def __init__(self, device: torch.device, memory: list[Any]) -> None:
        self.device, self.memory = device, memory
        self.allocations: list[range] = []
        self.is_refused = False

    def find(self, tensor: Tensor) -> Location | None:
        """Return the location of a tensor; None where CUDA does not share its memory."""
        address = tensor.data_ptr()
        number = next((i for i, allocation in enumerate(self.allocations) if address in allocation), None)
        if number is not None:
            return number, address - self.allocations[number].start
        try:
            allocation, fields = CudaMemory(self.device).export_allocation(address)
        except (RuntimeError, ImportError) as error:
            if not self.is_refused:
                logger.info("weights are written through buckets, because CUDA does not share their memory (%s)", error)
            self.is_refused = True
            return None
        self.allocations.append(allocation)
        self.memory.append(fields)
        return len(self.allocations) - 1, address - allocation.start


def _pointers(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _page_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
