"""The sum of a unit's gradient over all ranks: each rank gets the sum of its own part, added in rank order.

Every rank sends each other rank that rank's part of its own gradient, in rounds of one chunk per receiver, and adds
what it receives to its own. So 1/size of each gradient leaves each device for the host, and what is computed does not
depend on who comes first. A count in shared memory says how many rounds a rank has sent, another how many it has read;
on CUDA the stream itself writes them and waits for them.
"""

from functools import partial

import torch
from torch import Tensor

from megatrain_verl.streaming.group import cuda_driver
from megatrain_verl.streaming.group.control import Counter
from megatrain_verl.streaming.group.group import HostGroup, part_of
from megatrain_verl.streaming.group.mailboxes import SLOTS, chunk_elements, make_mailboxes
from megatrain_verl.streaming.streams import CudaQueue, WorkQueue


class GradientExchange:
    """Sums gradients over the ranks of `group`; all ranks make it, and reduce the same units in the same order.

    `reduce` appends to `queue`, the grad stream.
    """

    def __init__(self, group: HostGroup, queue: WorkQueue, device: str) -> None:
        self._group, self._queue = group, queue
        self._chunk = chunk_elements(group.size)
        self._mailboxes = make_mailboxes(group, device)
        self._counts = DeviceCounts(group, queue) if isinstance(queue, CudaQueue) else HostCounts(group, queue)
        self._rounds = 0

    def reduce(self, gradient: Tensor) -> Tensor:
        """This rank's part of the sum of `gradient` (float32, a whole unit), in the place of its part of `gradient`."""
        group = self._group
        parts = [gradient[slice(*part_of(gradient.numel(), rank, group.size))] for rank in range(group.size)]
        for start in range(0, parts[0].numel(), self._chunk):
            chunks = [part[start : start + self._chunk] for part in parts]
            self._round(chunks, self._rounds % SLOTS)
        return parts[group.rank]

    def close(self) -> None:
        """Release the mailboxes. No rank may be in a round."""
        self._counts.close()
        self._mailboxes.close()

    def _round(self, chunks: list[Tensor], slot: int) -> None:
        rank, queue = self._group.rank, self._queue
        self._counts.wait(Counter.READ, self._rounds - SLOTS + 1, "a free slot in the mailboxes")
        for receiver, chunk in enumerate(chunks):
            if receiver != rank and chunk.numel():
                queue.run(partial(self._mailboxes.put, receiver, slot, chunk))
        self._counts.write(Counter.SENT, self._rounds + 1)
        self._counts.wait(Counter.SENT, self._rounds + 1, "the others' gradients")
        if chunks[rank].numel():
            queue.run(partial(self._add, chunks[rank], slot))
        self._counts.write(Counter.READ, self._rounds + 1)
        self._rounds += 1

    @torch.no_grad()
    def _add(self, own: Tensor, slot: int) -> None:
        """own = ((part of rank 0 + part of rank 1) + part of rank 2) + ..."""
        rank = self._group.rank
        received = partial(self._mailboxes.get, slot=slot, numel=own.numel())
        if rank > 0:
            before = received(0)
            for sender in range(1, rank):
                before.add_(received(sender))
            own.add_(before)
        for sender in range(rank + 1, self._group.size):
            own.add_(received(sender))


class HostCounts:
    """Counts that the host writes and waits for, where work runs inline."""

    def __init__(self, group: HostGroup, queue: WorkQueue) -> None:
        self._group, self._queue = group, queue

    def write(self, counter: Counter, value: int) -> None:
        """After the work so far, set this rank's count."""
        self._queue.run(partial(self._group.control.set, counter, value))

    def wait(self, counter: Counter, least: int, purpose: str) -> None:
        """What follows waits until every rank's count is `least` or more."""
        self._queue.run(partial(self._group.wait_counts, counter, least, purpose))

    def close(self) -> None:
        """Nothing to release."""


class DeviceCounts:
    """Counts that a CUDA stream writes and waits for, in the group's page."""

    def __init__(self, group: HostGroup, queue: CudaQueue) -> None:
        self._group, self._stream = group, queue.stream
        page = group.control
        self._page = page.address
        mapped = cuda_driver.map_host(page.address, page.nbytes)
        self._addresses = {
            (counter, rank): mapped + page.address_of(counter, rank) - page.address
            for counter in (Counter.SENT, Counter.READ)
            for rank in range(group.size)
        }

    def write(self, counter: Counter, value: int) -> None:
        """After the work so far, set this rank's count."""
        cuda_driver.write_count(self._stream, self._addresses[counter, self._group.rank], value)

    def wait(self, counter: Counter, least: int, purpose: str) -> None:
        """What follows waits until every rank's count is `least` or more; `purpose` is what the host would say."""
        for rank in range(self._group.size):
            if rank != self._group.rank:
                cuda_driver.wait_count(self._stream, self._addresses[counter, rank], max(least, 0))

    def close(self) -> None:
        """Unlock the page."""
        cuda_driver.unmap_host(self._page)
