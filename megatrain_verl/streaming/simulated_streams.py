"""A CPU twin of the device's streams that finds missing waits.

Work is only recorded when the engine appends it. When the host waits for a mark, the recorded work runs in a random
order among those that the recorded waits allow, as a device may run it. An engine whose waits are complete computes
the same bits in every order; leave out one wait (`drop`) and some order gives another result.
"""

import random
from collections import deque
from collections.abc import Callable

from megatrain_verl.streaming.streams import LANES, QUEUES, Event, Streams


class SimulatedEvent:
    """A mark in a simulated queue."""

    def __init__(self, owner: "SimulatedStreams") -> None:
        self._owner = owner
        self.done = False

    def synchronize(self) -> None:
        self._owner.run_until(self)

    def query(self) -> bool:
        return self.done


class SimulatedQueue:
    """Work that has been appended and not run yet, with the marks and waits between it."""

    def __init__(self, owner: "SimulatedStreams") -> None:
        self._owner = owner
        self.items: deque[Callable[[], None] | SimulatedEvent | tuple[SimulatedEvent]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.items.append(work)

    def record(self) -> Event:
        event = SimulatedEvent(self._owner)
        self.items.append(event)
        return event

    def wait(self, event: Event, reason: str) -> None:
        if self._owner.must_wait(event, reason):
            self.items.append((event,))

    def ready(self) -> bool:
        """Whether the first item may run now."""
        return bool(self.items) and not (isinstance(self.items[0], tuple) and not self.items[0][0].done)

    def step(self) -> None:
        """Run the first item."""
        item = self.items.popleft()
        if isinstance(item, SimulatedEvent):
            item.done = True
        elif not isinstance(item, tuple):
            item()


class SimulatedStreams(Streams):
    """All queues of an engine that is alone, run in a random allowed order.

    Args:
        seed: of the order.
        drop: the reason of one wait to leave out, or None.

    `waits` collects the reasons of all waits for work that was not finished when the engine asked.
    """

    def __init__(self, seed: int, drop: str | None = None) -> None:
        self._random = random.Random(seed)
        self._drop = drop
        self.waits: set[str] = set()
        self._priority = [SimulatedQueue(self) for _ in range(len(QUEUES) + LANES)]
        for name, queue in zip(QUEUES, self._priority, strict=False):
            setattr(self, name, queue)
        self.lanes = self._priority[len(QUEUES) :]
        self._random.shuffle(self._priority)
        self._change = self._random.choice((0.0, 0.01, 0.1))  # how often priorities change, per piece of work

    def must_wait(self, event: Event, reason: str) -> bool:
        """Note the wait; False if there is nothing to wait for or this is the wait to leave out."""
        if event.query():
            return False
        self.waits.add(reason)
        return reason != self._drop

    def host_wait(self, event: Event, reason: str) -> None:
        if self.must_wait(event, reason):
            event.synchronize()

    def run_until(self, event: SimulatedEvent) -> None:
        """Run work in a random allowed order until `event` is reached.

        Raises:
            RuntimeError: the waits block each other.
        """
        while not event.done:
            ready = [queue for queue in self._priority if queue.ready()]
            if not ready:
                raise RuntimeError("the streams wait for each other: no queue can go on")
            ready[0].step()
            # Strict priorities let one queue run far ahead and starve another: that is how a missing wait shows.
            if self._random.random() < self._change:
                self._random.shuffle(self._priority)

    def abandon(self) -> None:
        for queue in (*self._on_device(), self.reader):
            queue.items.clear()

    def idle(self) -> bool:
        """Whether all work on the device has run; AdamW on the host may still be pending."""
        return not any(queue.items for queue in (*self._on_device(), *self.lanes))

    def _on_device(self) -> tuple[SimulatedQueue, ...]:
        return self.weight, self.compute, self.grad, self.adder
