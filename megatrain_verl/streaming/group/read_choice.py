"""Whether the ranks read weights together or each reads all of them: if asked, what is faster on this machine."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain_verl.streaming.group import cuda_driver
from megatrain_verl.streaming.group.control import Counter
from megatrain_verl.streaming.group.counts import make_counts
from megatrain_verl.streaming.group.group import Group, HostGroup
from megatrain_verl.streaming.group.mailboxes import DeviceMailboxes, HostMailboxes, chunk_elements
from megatrain_verl.streaming.group.shared_reads import SharedReads
from megatrain_verl.streaming.streams import Event, Streams

logger = logging.getLogger(__name__)
# Whether to read together; None measures on CUDA and takes what is faster. (On CPU all ranks read the same memory, and
# a second copy is never faster.) Tests and benchmarks set it. Reading together has run with processes on a CPU only:
# it is not the default until it has on GPUs.
TOGETHER: bool | None = False
FASTER = 1.1  # less does not pay for ranks that wait for each other at every unit
MEASURED_BYTES, REPEATS, TRIES = 128 << 20, 8, 3


@dataclass(frozen=True)
class ReadChoice:
    """How weights are read, in words, and what reads them together; None if every rank reads all."""

    how: str
    reads: SharedReads | None = None


def choose_reads(group: Group, streams: Streams, source: Tensor, device: str) -> ReadChoice:
    """The faster way to read weights; the same in all ranks, each of which calls this.

    `source` is a unit's weights on the host (flat, page-locked on CUDA), which are copied for the measurement.
    """
    choice = _choose(group, streams, source, device)
    if group.size > 1 and group.rank == 0:
        logger.info("weights are read %s", choice.how)
    return choice


def _choose(group: Group, streams: Streams, source: Tensor, device: str) -> ReadChoice:
    if not isinstance(group, HostGroup) or TOGETHER is False or (TOGETHER is None and device != "cuda"):
        return ReadChoice("in full by every rank")
    try:
        reads = _make(group, streams, source.dtype, device)
    except cuda_driver.CudaDriverError as error:
        return ReadChoice(f"in full by every rank: {error}")
    if TOGETHER:
        return ReadChoice("once and sent on, unmeasured", reads)
    full, together = rates(group, streams, reads, source, device)
    text = f"each GPU gets {together / 1e9:.1f} GB/s of weights read once, {full / 1e9:.1f} where every rank reads all"
    if together > FASTER * full:
        return ReadChoice(f"once and sent on: {text}", reads)
    reads.close()
    return ReadChoice(f"in full by every rank: {text}")


def rates(group: HostGroup, streams: Streams, reads: SharedReads, source: Tensor, device: str) -> tuple[float, float]:
    """Bytes/s at which the slowest rank gets weights when each rank reads all, and when they are read once.

    The same numbers in all ranks, each of which calls this.
    """
    source = source[: MEASURED_BYTES // source.itemsize]
    best = _best_seconds(group, streams, reads, source, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    full, together = (max(seconds) for seconds in zip(*group.gather(best, "the rates of reading"), strict=True))
    return REPEATS * source.nbytes / full, REPEATS * source.nbytes / together


def _best_seconds(group: HostGroup, streams: Streams, reads: SharedReads, source: Tensor, device: str) -> list[float]:
    target = torch.empty_like(source, device=device)

    def full() -> Event:
        streams.weight.run(partial(target.copy_, source, non_blocking=True))
        return streams.weight.record()

    ways = (full, partial(reads.read, "measured", target, source))
    tries = [[_seconds(group, way) for way in ways] for _ in range(TRIES)]
    return [min(seconds) for seconds in zip(*tries, strict=True)]


def _seconds(group: HostGroup, read: Callable[[], Event]) -> float:
    group.gather([], "the start of a measurement")
    start = time.perf_counter()
    for _ in range(REPEATS):
        event = read()
    group.wait_for(event, "the end of a measurement")
    return time.perf_counter() - start


def _make(group: HostGroup, streams: Streams, dtype: torch.dtype, device: str) -> SharedReads:
    if device == "cuda":
        mailboxes = DeviceMailboxes(group, dtype)
    else:
        mailboxes = HostMailboxes(group, device, dtype, "weight mailboxes")
    counts = make_counts(group, Counter.READ, streams.peers, "the others' parts of the weights")
    return SharedReads(group, streams, mailboxes, counts, chunk_elements(group.size, dtype))
