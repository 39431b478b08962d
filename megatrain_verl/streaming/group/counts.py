"""Counts of finished rounds in the group's page: how ranks, and the streams of their devices, order their work."""

from functools import partial
from typing import Protocol

from megatrain_verl.streaming.group import cuda_driver
from megatrain_verl.streaming.group.control import Counter
from megatrain_verl.streaming.group.group import HostGroup
from megatrain_verl.streaming.streams import CudaQueue, WorkQueue


class Counts(Protocol):
    """The counts of all ranks of one kind of rounds."""

    def write_and_wait(self, rounds: int) -> None:
        """After the work so far this rank has done so many rounds; what follows waits until every rank has."""


class HostCounts:
    """The host writes them and waits for them, where work runs inline.

    Args:
        queue: its work is ordered.
        what: every rank has done in a round, for messages.
    """

    def __init__(self, group: HostGroup, counter: Counter, queue: WorkQueue, what: str) -> None:
        self._group, self._counter, self._queue, self._what = group, counter, queue, what

    def write_and_wait(self, rounds: int) -> None:
        self._queue.run(partial(self._group.control.set, self._counter, rounds))
        self._queue.run(partial(self._group.wait_counts, self._counter, rounds, self._what))


class DeviceCounts:
    """A CUDA stream writes them and waits for them."""

    def __init__(self, group: HostGroup, counter: Counter, queue: CudaQueue) -> None:
        self._rank, self._stream = group.rank, queue.stream
        self._addresses = [group.control.address_on_device(counter, rank) for rank in range(group.size)]

    def write_and_wait(self, rounds: int) -> None:
        cuda_driver.write_count(self._stream, self._addresses[self._rank], rounds)
        for rank, address in enumerate(self._addresses):
            if rank != self._rank:
                cuda_driver.wait_count(self._stream, address, rounds)


def make_counts(group: HostGroup, counter: Counter, queue: WorkQueue, what: str) -> Counts:
    """Those that fit to `queue`; see `HostCounts`."""
    if isinstance(queue, CudaQueue):
        return DeviceCounts(group, counter, queue)
    return HostCounts(group, counter, queue, what)
