"""Weights that all ranks need are read from host memory once: each rank reads its part and sends it to the others.

Where nothing is frozen, a rank's part of a unit is the one that it updates and whose pages it has touched. It goes in
chunks from the host into the rank's own device slot, and from there into the mailboxes of the others, who copy it into
their slots. So slots stay private, and while one chunk goes from device to device, the next one comes from the host.

A count in shared memory says how many chunks a rank has sent; on CUDA the stream itself writes it and waits for it.
As in the exchange of gradients, a mailbox has two slots used in turn: who sends chunk r + 2 has waited until the others
had sent chunk r + 1, and they had taken chunk r before that.

All ranks must read the same units in the same order, between the same rounds of the exchange: see `pass_agreement.py`.
"""

import zlib
from functools import partial

from torch import Tensor

from megatrain_verl.streaming.group.counts import Counts
from megatrain_verl.streaming.group.group import Group, part_of
from megatrain_verl.streaming.group.mailboxes import SLOTS, Mailboxes
from megatrain_verl.streaming.streams import Event, Streams


class SharedReads:
    """Reads units together with the other ranks of `group`.

    Args:
        streams: `weight` copies from the host, `peers` sends and takes.
        mailboxes: of weights, for chunks of `chunk` elements.
        counts: of the chunks that each rank has sent, which `peers` writes and waits for.
    """

    def __init__(self, group: Group, streams: Streams, mailboxes: Mailboxes, counts: Counts, chunk: int) -> None:
        self._rank, self._size = group.rank, group.size
        self._weight, self._peers = streams.weight, streams.peers
        self._mailboxes, self._counts, self._chunk = mailboxes, counts, chunk
        self._rounds = 0
        self.history = 0  # a checksum of the names of all units read so far, in their order

    def read(self, unit: str, target: Tensor, source: Tensor) -> Event:
        """Start to fill `target` (flat, on the device) from `source` (as long, on the host, the same in all ranks).

        What has been appended to the weight stream comes first. Returns the mark behind which `target` is filled.
        """
        self.history = zlib.crc32(unit.encode(), self.history)
        parts = [part_of(source.numel(), rank, self._size) for rank in range(self._size)]
        for offset in range(0, parts[0][1], self._chunk):
            chunks = [slice(min(start + offset, end), min(start + offset + self._chunk, end)) for start, end in parts]
            self._round(target, source, chunks)
        return self._peers.record()

    def elements(self, numel: int) -> int:
        """How many of the `numel` elements of a unit this rank reads from the host."""
        start, end = part_of(numel, self._rank, self._size)
        return end - start

    def close(self) -> None:
        """Release the mailboxes. No rank may be reading."""
        self._mailboxes.close()

    def _round(self, target: Tensor, source: Tensor, chunks: list[slice]) -> None:
        slot, own = self._rounds % SLOTS, chunks[self._rank]
        self._weight.run(partial(_copy, target[own], source[own]))
        self._peers.wait(self._weight.record(), "own part of the weights on the device")
        others = [rank for rank in range(self._size) if rank != self._rank]
        for receiver in others if own.start < own.stop else []:
            self._peers.run(partial(self._mailboxes.put, receiver, slot, target[own]))
        self._rounds += 1
        self._counts.write_and_wait(self._rounds)
        for sender in others:
            self._peers.run(partial(self._take, target[chunks[sender]], sender, slot))

    def _take(self, target: Tensor, sender: int, slot: int) -> None:
        _copy(target, self._mailboxes.get(sender, slot, target.numel()))


def _copy(target: Tensor, source: Tensor) -> None:
    # Through `data`: see `device_ring.py`.
    target.data.copy_(source, non_blocking=True)
