"""Where work runs: the weight, compute and gradient streams of the device, and two threads of the host.

Queues behind one interface. `run` puts work into a queue, `record` marks a point of it, `wait` makes a queue
wait for a mark of another one; nothing in a step waits for the whole device.

    weight     host arena -> device slot
    peers      parts of weights between devices, where several ranks read a unit together
    compute    layers, head, gradient accumulation
    grad       gradient accumulator -> host arena
    adder      gradient slab -> added to the host arena
    optimizer  AdamW on the host, one unit after the other
    reader     reference file -> host buffer
    lanes      AdamW on the device, a chunk at a time: in, update, out

On CUDA the first four and the lanes are streams and the others threads. On CPU they run inline. `simulated_streams.py`
has the third kind, which runs the recorded work in random allowed orders to find missing waits.
"""

import functools
import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import torch

logger = logging.getLogger(__name__)
QUEUES = ("weight", "compute", "grad", "adder", "optimizer", "reader")  # of a rank that is alone
LANES = 3


class Event(Protocol):
    """A mark in a queue."""

    def synchronize(self) -> None:
        """Block the caller until everything before the mark is done; raises what the queue's work raised."""

    def query(self) -> bool:
        """Whether everything before the mark is done."""


class WorkQueue(Protocol):
    """An ordered queue of work."""

    def run(self, work: Callable[[], None]) -> None:
        """Append `work`. It may start at once or later, but in order."""

    def record(self) -> Event:
        """A mark behind everything appended so far."""

    def wait(self, event: Event, reason: str) -> None:
        """What is appended from now on starts after `event`. `reason` names the hazard."""

    def finished(self) -> int:
        """How many pieces of its work are done, since the first call at the latest. One thread calls it."""


class Streams:
    """All queues. `host_wait` is the only way in which the engine's main thread waits for one of them."""

    weight: WorkQueue
    peers: WorkQueue
    compute: WorkQueue
    grad: WorkQueue
    adder: WorkQueue
    optimizer: WorkQueue
    reader: WorkQueue
    lanes: list[WorkQueue]

    def host_wait(self, event: Event, reason: str) -> None:
        """Block the main thread until `event`. `reason` names what must be ready."""
        event.synchronize()

    def finished(self) -> int:
        """How many pieces of work the queues have done: grows as long as any of them goes on."""
        return 0

    def abandon(self) -> None:
        """After a failed pass: nothing that it appended to the queues runs any more when this returns."""

    def close(self) -> None:
        """End the threads that the queues own."""


class _Done:
    """The mark of a queue whose work is always finished."""

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class InlineQueue:
    """Runs work where it is appended: the CPU's stand-in for a device stream."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return _Done()

    def wait(self, event: Event, reason: str) -> None:
        event.synchronize()

    def finished(self) -> int:
        return 0  # its work takes the time of the thread that appends it


class Marks:
    """Marks of a queue in the order of its work; `count` those that have been reached."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._reached = 0

    def add(self, event: Event) -> None:
        """The mark behind the newest piece of work."""
        self._waiting.append(event)

    def count(self) -> int:
        """How many have been reached. Another thread may add meanwhile."""
        while self._waiting and self._waiting[0].query():
            self._waiting.popleft()
            self._reached += 1
        return self._reached


class CudaQueue:
    """A CUDA stream. Work is launched where it is appended and runs on the device in order."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._marks: Marks | None = None  # behind every piece, once somebody asks

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self.stream):
            work()
        if self._marks is not None:
            self._marks.add(self.stream.record_event())

    def record(self) -> Event:
        return self.stream.record_event()

    def wait(self, event: Event, reason: str) -> None:
        if isinstance(event, torch.cuda.Event):
            self.stream.wait_event(event)
        else:
            event.synchronize()

    def finished(self) -> int:
        self._marks = self._marks or Marks()
        with torch.cuda.device(self.stream.device):  # a new thread's is the first one, and would get a context
            return self._marks.count()


class ThreadEvent:
    """A mark in a `ThreadQueue`."""

    def __init__(self, owner: "ThreadQueue") -> None:
        self._owner = owner
        self.reached = threading.Event()

    def synchronize(self) -> None:
        self.reached.wait()
        self._owner.raise_error()

    def query(self) -> bool:
        return self.reached.is_set()


class ThreadQueue:
    """A host thread that works through its queue. After an error it does no more work; every later wait raises it.

    `spans`: (start, end) of the last pieces of work, in seconds since the epoch.
    """

    def __init__(self, name: str) -> None:
        self.spans: deque[tuple[float, float]] = deque(maxlen=4096)
        self._queue: queue.SimpleQueue[Callable[[], None] | ThreadEvent | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._finished = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        self._queue.put(functools.partial(self._timed, work))

    def _timed(self, work: Callable[[], None]) -> None:
        start = time.time()
        work()
        self.spans.append((start, time.time()))

    def record(self) -> Event:
        event = ThreadEvent(self)
        self._queue.put(event)
        return event

    def wait(self, event: Event, reason: str) -> None:
        self._queue.put(event.synchronize)

    def finished(self) -> int:
        return self._finished

    def raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"{self._thread.name} thread failed: {self._error}") from self._error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, ThreadEvent):
                item.reached.set()
            elif self._error is None:
                try:
                    item()
                    self._finished += 1
                except BaseException as error:  # kept for whoever waits next
                    self._error = error


@functools.cache
def _cuda_queue(name: str) -> CudaQueue:
    # Streams live as long as the process: engines share them, and no stream is made after vLLM measured its memory.
    return CudaQueue()


def do_after_failure(*steps: Callable[[], None]) -> None:
    """Do every step of what follows a failed pass, whatever another one raises.

    Further errors are logged and not raised: that of the pass, which the caller raises, comes first, and a queue that
    has failed says so again at the next wait.
    """
    for step in steps:
        try:
            step()
        except Exception as error:
            logger.warning("another error while a failed pass is cleared away: %s", error, exc_info=True)


class DeviceStreams(Streams):
    """CUDA streams, or inline queues on CPU, and threads for the work on the host.

    `wait` blocks until an event; in a group of ranks it also finds out that another rank has failed.
    `waited`: seconds that the main thread has waited, by reason.
    """

    def __init__(self, device: str, wait: Callable[[Event, str], None] | None = None) -> None:
        self._wait = wait or super().host_wait
        self.waited: defaultdict[str, float] = defaultdict(float)
        make = _cuda_queue if device == "cuda" else lambda name: InlineQueue()
        names = ("weight", "peers", "compute", "grad")
        self.weight, self.peers, self.compute, self.grad = (make(name) for name in names)
        self.lanes = [make(f"lane {index}") for index in range(LANES)]
        self.adder = ThreadQueue("gradient adder")
        self.optimizer = ThreadQueue("host optimizer")
        self.reader = ThreadQueue("reference reader")

    def host_wait(self, event: Event, reason: str) -> None:
        start = time.perf_counter()
        self._wait(event, reason)
        self.waited[reason] += time.perf_counter() - start

    def finished(self) -> int:
        on_device = (self.weight, self.peers, self.compute, self.grad, *self.lanes)
        return sum(each.finished() for each in (*on_device, self.adder, self.optimizer, self.reader))

    def abandon(self) -> None:
        with ExitStack() as waits:  # for all of them, whatever one raises
            for queue_of_pass in (self.reader, self.adder, self.grad, self.compute, self.peers, self.weight):
                waits.callback(lambda each=queue_of_pass: each.record().synchronize())

    def close(self) -> None:
        self.adder.close()
        self.optimizer.close()
        self.reader.close()
