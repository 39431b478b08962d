"""Memory of each rank into which the other ranks put parts of gradients or of weights: (slots, sender, elements).

On a device, if each can write into the other's memory (NVLink, or PCIe peer access): `DeviceMailboxes`. Else in shared
memory of the host: `HostMailboxes`. Gradients (float32) and weights have mailboxes of their own.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from megatrain_verl.streaming.group import cuda_driver
from megatrain_verl.streaming.group.group import HostGroup
from megatrain_verl.streaming.host_memory import HostBuffer, padded

logger = logging.getLogger(__name__)
SLOTS = 2  # one is filled while the other is read
MAILBOX_BYTES = 64 << 20  # of one rank, for gradients; for weights as many
CHECKED = 1 << 18  # elements


def chunk_elements(size: int, dtype: torch.dtype) -> int:
    """Elements of one part, for `size` ranks."""
    return MAILBOX_BYTES // (dtype.itemsize * SLOTS * size) // 128 * 128


class Mailboxes(Protocol):
    """`put` and `get` append to the current stream, or run at once on CPU."""

    def put(self, receiver: int, slot: int, part: Tensor) -> None:
        """Copy `part` into the mailbox of `receiver`."""

    def get(self, sender: int, slot: int, numel: int) -> Tensor:
        """What `sender` has put into this rank's mailbox, on the device; may be written to until the slot is free."""

    def close(self) -> None:
        """Release the memory."""


class HostMailboxes:
    """In shared memory of the host, page-locked for a CUDA device. `kind` is one of the group's `FILES`."""

    def __init__(self, group: HostGroup, device: str, dtype: torch.dtype, kind: str) -> None:
        self._rank, self._device = group.rank, device
        shape = (SLOTS, group.size, chunk_elements(group.size, dtype))
        nbytes = dtype.itemsize * shape[0] * shape[1] * shape[2]
        file = group.shared_mailboxes(kind, group.size * padded(nbytes))
        self._buffers = [
            HostBuffer(nbytes, f"mailbox of rank {rank}", register=device == "cuda", shared=file)
            for rank in range(group.size)
        ]
        file.close()
        self._boxes = [buffer.view(dtype).view(shape) for buffer in self._buffers]

    def put(self, receiver: int, slot: int, part: Tensor) -> None:
        self._boxes[receiver][slot, self._rank, : part.numel()].copy_(part, non_blocking=True)

    def get(self, sender: int, slot: int, numel: int) -> Tensor:
        return self._boxes[self._rank][slot, sender, :numel].to(self._device, non_blocking=True)

    def close(self) -> None:
        self._boxes = []
        for buffer in self._buffers:
            buffer.close()


class DeviceMailboxes:
    """On the devices.

    Raises:
        CudaDriverError: the devices cannot write into each other's memory; in every rank.
    """

    def __init__(self, group: HostGroup, dtype: torch.dtype) -> None:
        self._group, self._dtype, self._chunk = group, dtype, chunk_elements(group.size, dtype)
        self._address, self._handle = 0, b""
        self._box: Tensor | None = None
        self._peers: dict[int, int] = {}  # rank -> address of its mailbox
        problem = None
        try:
            self._allocate()
        except cuda_driver.CudaDriverError as error:
            problem = str(error)
        problem = self._open(problem)
        # Every rank comes to the same gathers, whatever is wrong in it.
        if any(failed for (failed,) in group.gather([float(problem is not None)], "access between the devices")):
            self.close()
            raise cuda_driver.CudaDriverError(problem or "another rank has no access")

    def put(self, receiver: int, slot: int, part: Tensor) -> None:
        place = (slot * self._group.size + self._group.rank) * self._chunk
        target = self._peers[receiver] + self._dtype.itemsize * place
        cuda_driver.copy(target, part.data_ptr(), part.nbytes, torch.cuda.current_stream())

    def get(self, sender: int, slot: int, numel: int) -> Tensor:
        return self._box[slot, sender, :numel]

    def close(self) -> None:
        """Release the memory, once no rank writes to it any more. Every rank calls it, in any thread."""
        cuda_driver.make_context()
        for address in self._peers.values():
            cuda_driver.close_shared(address)
        self._peers.clear()
        try:
            if self._group.control.failure() is None:
                self._group.gather([], "the end of the mailboxes")
        finally:
            self._box = None
            if self._address:
                cuda_driver.free(self._address)
            self._address = 0

    def _allocate(self) -> None:
        nbytes = SLOTS * self._group.size * self._chunk * self._dtype.itemsize
        self._address = cuda_driver.allocate(nbytes)
        box = torch.as_tensor(cuda_driver.DeviceArray(self._address, nbytes), device="cuda").zero_()
        self._box = box.view(self._dtype).view(SLOTS, self._group.size, self._chunk)
        self._handle = cuda_driver.share(self._address)
        torch.cuda.current_stream().synchronize()

    def _open(self, problem: str | None) -> str | None:
        """Open the mailboxes of the others and try them; what is wrong, or None. On some hosts copies lose data."""
        group = self._group
        own = self._handle if problem is None else bytes(cuda_driver.IPC_HANDLE_BYTES)
        handles = group.gather([float(byte) for byte in own], "the handles of the mailboxes")
        others = [rank for rank in range(group.size) if rank != group.rank and any(handles[rank])]
        try:
            for rank in others if problem is None else []:
                self._peers[rank] = cuda_driver.open_shared(bytes(int(byte) for byte in handles[rank]))
                self.put(rank, 0, self._pattern(group.rank))
            torch.cuda.current_stream().synchronize()
        except cuda_driver.CudaDriverError as error:
            problem = str(error)
        group.gather([], "copies between the devices")
        for rank in self._peers if problem is None else []:
            if not torch.equal(self.get(rank, 0, CHECKED), self._pattern(rank)):
                problem = f"a copy from the device of rank {rank} to that of rank {group.rank} lost data"
        return problem

    def _pattern(self, rank: int) -> Tensor:
        """Whole numbers that every type has, (`CHECKED`,); no two neighbours and no two ranks have the same."""
        return (torch.arange(CHECKED, device="cuda") * 7 + rank).remainder(251).to(self._dtype)


def make_mailboxes(group: HostGroup, device: str) -> Mailboxes:
    """For gradients: on the devices where that is possible, else in host memory. Every rank calls it."""
    if device == "cuda":
        try:
            return DeviceMailboxes(group, torch.float32)
        except cuda_driver.CudaDriverError as error:
            logger.warning("gradients are exchanged through host memory: %s", error)
    return HostMailboxes(group, device, torch.float32, "gradient mailboxes")
