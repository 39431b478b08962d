"""The sum of a unit's gradient over all ranks: each rank gets the sum of its own part, added in rank order.

Every rank sends each other rank that rank's part of its own gradient, in rounds of one chunk per receiver, and adds
what it receives to its own. So 1/size of each gradient leaves each device for the host, and what is computed does not
depend on who comes first. A count in shared memory says how many rounds a rank has sent; on CUDA the stream itself
writes it and waits for it.

A mailbox has two slots, used in turn. Who sends round r + 2 has waited until the others had sent round r + 1, and they
had read round r before that: the slot is free.
"""

from functools import partial

import torch
from torch import Tensor

from megatrain_verl.streaming.group.control import Counter
from megatrain_verl.streaming.group.counts import make_counts
from megatrain_verl.streaming.group.group import HostGroup, part_of
from megatrain_verl.streaming.group.mailboxes import SLOTS, chunk_elements, make_mailboxes
from megatrain_verl.streaming.streams import WorkQueue


class GradientExchange:
    """Sums gradients over the ranks of `group`; all ranks make it, and reduce the same units in the same order.

    `reduce` appends to `queue`, the grad stream.
    """

    def __init__(self, group: HostGroup, queue: WorkQueue, device: str) -> None:
        self._group, self._queue = group, queue
        self._chunk = chunk_elements(group.size, torch.float32)
        self._mailboxes = make_mailboxes(group, device)
        self._counts = make_counts(group, Counter.SENT, queue, "the others' gradients")
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
        self._mailboxes.close()

    def _round(self, chunks: list[Tensor], slot: int) -> None:
        rank, queue = self._group.rank, self._queue
        for receiver, chunk in enumerate(chunks):
            if receiver != rank and chunk.numel():
                queue.run(partial(self._mailboxes.put, receiver, slot, chunk))
        self._counts.write_and_wait(self._rounds + 1)
        if chunks[rank].numel():
            queue.run(partial(self._add, chunks[rank], slot))
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
