"""The shared page through which ranks see each other's counters, values and failures.

Every count has one writer, its rank, and lies in a cache line of its own. Stores of 8 aligned bytes become visible
whole and in order on x86-64, so nothing is locked.
"""

import mmap
import os
import time
from enum import IntEnum

import numpy as np

from megatrain_verl.streaming.group import cuda_driver

LINE = 8  # int64 per cache line
VALUES = 64  # float64 that a rank may give at once
PURPOSE = 64  # bytes: what a rank gives them for
MESSAGE = 1024  # bytes
RELEASED = 1 << 62  # above every count: lets waits of the device pass after a failure


class Counter(IntEnum):
    """What is counted, for each rank."""

    ARRIVED = 0  # barriers and gathers
    SENT = 1  # rounds of the gradient exchange whose parts it has put into the others' mailboxes
    UPDATED = 2  # units whose part it has updated
    BEATS = 3  # grows while the process runs
    ACTIVITY = 4  # grows while the thread that trains works, or waits for what goes on
    FINISHED = 5  # pieces of work that its queues have done: of AdamW, of the device
    LEFT = 6  # 1 when it has closed the group
    FAILED_AT = 7  # time in ns at which it found a failure; 0: none
    PID = 8
    READ = 9  # rounds of shared reads whose parts of the weights it has put into the others' mailboxes


OF_DEVICE = (Counter.SENT, Counter.READ)  # streams of the devices write them and wait for them


class ControlPage:
    """Counters, values and messages of `size` ranks in the memory of `fd`."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        self._rank = rank
        counters, values = len(Counter) * size * LINE, 2 * size * VALUES
        texts = 2 * size * PURPOSE + size * MESSAGE
        self.nbytes = -(-(8 * (counters + values) + texts) // mmap.PAGESIZE) * mmap.PAGESIZE
        if os.fstat(fd).st_size < self.nbytes:  # the first rank; the file is made for one group
            os.ftruncate(fd, self.nbytes)
        page = np.frombuffer(mmap.mmap(fd, self.nbytes), dtype=np.uint8)
        self.address: int = page.ctypes.data
        self._on_device: int | None = None
        self._counters = page[: 8 * counters].view(np.int64).reshape(len(Counter), size, LINE)[..., 0]
        self._values = page[8 * counters :][: 8 * values].view(np.float64).reshape(2, size, VALUES)
        texts = page[8 * (counters + values) :][:texts]
        self._purposes = texts[: -size * MESSAGE].reshape(2, size, PURPOSE)
        self._messages = texts[-size * MESSAGE :].reshape(size, MESSAGE)

    def get(self, counter: Counter, rank: int) -> int:
        """The count of `rank`."""
        return int(self._counters[counter, rank])

    def of_all(self, counter: Counter) -> list[int]:
        """The counts of all ranks."""
        return self._counters[counter].tolist()

    def set(self, counter: Counter, value: int) -> None:
        """Set this rank's own count."""
        self._counters[counter, self._rank] = value

    def add(self, counter: Counter) -> None:
        """Raise this rank's own count by one."""
        self._counters[counter, self._rank] += 1

    def address_of(self, counter: Counter, rank: int) -> int:
        """Where the count lies in this process."""
        return self.address + 8 * LINE * (int(counter) * self._counters.shape[1] + rank)

    def address_on_device(self, counter: Counter, rank: int) -> int:
        """Where the count lies for the CUDA device of this process; page-locks the page at the first call."""
        if self._on_device is None:
            self._on_device = cuda_driver.map_host(self.address, self.nbytes)
        return self._on_device + self.address_of(counter, rank) - self.address

    def close(self) -> None:
        """Unlock the page, if it is page-locked. No stream waits any more."""
        if self._on_device is not None:
            cuda_driver.unmap_host(self.address)
        self._on_device = None

    def put_values(self, round_number: int, values: list[float], purpose: str) -> None:
        """This rank's values of a round; they stay until the round after the next."""
        self._values[round_number % 2, self._rank, : len(values)] = values
        text = purpose.encode()[:PURPOSE].ljust(PURPOSE, b"\0")
        self._purposes[round_number % 2, self._rank] = np.frombuffer(text, dtype=np.uint8)

    def values(self, round_number: int, count: int) -> list[list[float]]:
        """The values of all ranks, in rank order."""
        return self._values[round_number % 2, :, :count].tolist()

    def purposes(self, round_number: int) -> list[str]:
        """For what each rank has given its values, in rank order."""
        return [text.tobytes().rstrip(b"\0").decode(errors="replace") for text in self._purposes[round_number % 2]]

    def fail(self, culprit: int, what: str) -> None:
        """Tell the others that `culprit` has failed, unless this rank has told of a failure before."""
        if self.get(Counter.FAILED_AT, self._rank):
            return
        text = f"rank {culprit} (process {self.get(Counter.PID, culprit)}) failed: {what}".encode()[:MESSAGE]
        self._messages[self._rank, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        self.set(Counter.FAILED_AT, time.monotonic_ns())

    def failure(self) -> str | None:
        """What failed first, and which rank; None if nothing has."""
        found = [(found_at, rank) for rank, found_at in enumerate(self.of_all(Counter.FAILED_AT)) if found_at]
        if not found:
            return None
        return self._messages[min(found)[1]].tobytes().rstrip(b"\0").decode(errors="replace")

    def release_device_waits(self) -> None:
        """Let every stream pass that waits for a count: nobody will count on."""
        for counter in OF_DEVICE:
            self._counters[counter] = RELEASED
