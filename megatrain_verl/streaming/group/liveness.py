"""A thread in every rank that shows the others that it lives, and finds out when one of them does not.

A process that ends closes its sockets, which is noticed at once. One that is stopped no longer counts its beats. The
others still beat, but what others wait for may stand still in them, and matters only then:

- the training thread. It goes on while it takes processor time, or the process finishes a piece of work. Where it waits
  for other ranks it is excused; where it waits for work of its own process (AdamW, the device), that work must go on.
- AdamW, in a thread of its own, while the training thread may have nothing to do: a piece must be finished.

A piece is small, a part of a unit's update or a layer with one micro-batch: however slow a rank is, it finishes some.
"""

import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from megatrain_verl.streaming.group.control import ControlPage, Counter

TICK = 0.2  # seconds


class Liveness:
    """Watches the other ranks.

    Args:
        control: the group's page.
        sockets: by rank; rank 0 has one to every other rank, the others have one to rank 0.
        patience: seconds without a beat after which a rank counts as stopped.
        rank, size: this process in the group.
    """

    def __init__(
        self, control: ControlPage, sockets: dict[int, socket.socket], patience: float, rank: int, size: int
    ) -> None:
        self._control, self._sockets, self._patience, self._rank = control, sockets, patience, rank
        self._others = [other for other in range(size) if other != rank]
        # Time in ticks of this thread: pauses of the whole machine do not count.
        counters = (Counter.BEATS, Counter.ACTIVITY, Counter.FINISHED)
        watched = [(counter, other) for counter in counters for other in self._others]
        self._unchanged = {key: [0, 0] for key in watched}  # count when last seen, ticks since it changed
        self.finished: list[Callable[[], int]] = []  # each counts finished pieces of work
        # Set while the training thread waits or works on files: whether it may stand still at present.
        self.excused: Callable[[], bool] | None = None
        self._training_thread = threading.get_native_id()
        self._processor_time = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="group liveness", daemon=True)
        self._thread.start()

    def trains_here(self) -> None:
        """The calling thread is the one that trains."""
        self._training_thread = threading.get_native_id()

    def unchanged_seconds(self, counter: Counter, rank: int) -> float:
        """For how long a count of `rank` has been the same: BEATS, ACTIVITY or FINISHED."""
        return self._unchanged[counter, rank][1] * TICK

    def idle(self, counter: Counter, rank: int) -> str:
        """How `rank`, whose count has not changed for longer than allowed, stands still."""
        # A stopped process counts nothing: its other counts may be found unchanged a moment before its beats are.
        if self.unchanged_seconds(Counter.BEATS, rank) > self._patience / 2:
            return f"its process has not run for {self._patience:.0f} s"
        return f"it stands still for {self.unchanged_seconds(counter, rank):.0f} s"

    def close(self) -> None:
        """End the thread and say to the others that this rank leaves."""
        self._stop.set()
        self._thread.join()
        self._control.set(Counter.LEFT, 1)
        for connection in self._sockets.values():
            connection.close()

    def _watch(self) -> None:
        while not self._stop.wait(TICK):
            self._control.add(Counter.BEATS)
            if self._goes_on():
                self._control.add(Counter.ACTIVITY)
            self._compare()
            if self._control.failure() is not None:
                self._control.release_device_waits()
                continue
            for rank, what in self._dead():
                self._control.fail(rank, what)

    def _goes_on(self) -> bool:
        before, finished = self._control.get(Counter.FINISHED, self._rank), self._count_finished()
        self._control.set(Counter.FINISHED, finished)
        excused = self.excused
        return finished != before or (self._takes_time() if excused is None else excused())

    def _count_finished(self) -> int:
        try:
            return sum(count() for count in self.finished)
        except RuntimeError as error:  # of the device: nothing on it will finish, and every rank is told why
            self._control.fail(self._rank, f"{type(error).__name__}: {error}")
            self.finished.clear()
            return 0

    def _takes_time(self) -> bool:
        try:
            stat = Path(f"/proc/self/task/{self._training_thread}/stat").read_text()
        except FileNotFoundError:  # the thread has ended: whoever trains next says so
            return False
        before, self._processor_time = self._processor_time, " ".join(stat.rpartition(")")[2].split()[11:13])
        return self._processor_time != before

    def _compare(self) -> None:
        for (counter, rank), state in self._unchanged.items():
            value = self._control.get(counter, rank)
            state[1] = 0 if value != state[0] else state[1] + 1
            state[0] = value

    def _dead(self) -> list[tuple[int, str]]:
        by_socket = {connection: rank for rank, connection in self._sockets.items()}
        # Nothing is sent on them after the group was formed: readable means closed.
        closed = [by_socket[connection] for connection in select.select(list(by_socket), [], [], 0)[0]]
        found = []
        for rank in self._others:
            if self._control.get(Counter.LEFT, rank):
                self._sockets.pop(rank, None)
            elif rank in closed:
                found.append((rank, "its process has ended"))
            elif self.unchanged_seconds(Counter.BEATS, rank) > self._patience:
                found.append((rank, self.idle(Counter.BEATS, rank)))
        return found
