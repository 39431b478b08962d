"""Who trains together: ranks that meet, wait for each other within limits, and learn of each other's failures."""

import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from megatrain_verl.streaming.group.control import OF_DEVICE, ControlPage, Counter
from megatrain_verl.streaming.group.liveness import Liveness
from megatrain_verl.streaming.host_memory import SharedFile
from megatrain_verl.streaming.streams import Event

PATIENCE = 20.0  # seconds that a rank may stand still while others wait for it
LONGEST_WAIT = 3600.0  # seconds for a rank that goes on but does not come
HELLO = struct.Struct("<qq")  # rank, size
ALIGNMENT = 128  # elements: parts of different ranks share no cache line in any arena


class RankFailed(RuntimeError):
    """Another rank of the group has died, stands still or had an error; the message names it."""


def part_of(numel: int, rank: int, size: int) -> tuple[int, int]:
    """[start, end) of the elements of a unit that belong to `rank`; every element belongs to one rank."""
    share = -(-numel // (size * ALIGNMENT)) * ALIGNMENT
    return min(rank * share, numel), min((rank + 1) * share, numel)


class Group:
    """One process that has the arenas for itself; `HostGroup` is several.

    `arenas` is None: memory is private.
    """

    rank, size = 0, 1
    arenas: SharedFile | None = None

    def share_arenas(self, nbytes: int) -> None:
        """Map the memory from which the arenas are taken, `nbytes` at most. Every rank calls it."""

    def gather(self, values: list[float], purpose: str) -> list[list[float]]:
        """The values that every rank gives, in rank order. Every rank calls it, for the same purpose.

        Raises:
            RuntimeError: the purposes differ; names them.
        """
        return [values]

    def wait_for(self, event: Event, purpose: str) -> None:
        """Block until `event`, or until another rank fails."""
        event.synchronize()

    def updated(self) -> None:
        """This rank's part of one more unit is updated."""

    def wait_updated(self, count: int, purpose: str) -> None:
        """Block until every rank has updated its part of `count` units since the start."""

    def follow(self, finished: Callable[[], int]) -> None:
        """`finished` counts pieces of work that queues of this process have done; called by a thread of the group."""

    def long_work(self) -> AbstractContextManager[None]:
        """Inside, this rank may stand still for long."""
        return nullcontext()

    @contextmanager
    def by_first(self, purpose: str) -> Iterator[bool]:
        """Rank 0 does what is inside, where it gets True, for all; the others wait for it at the end."""
        yield True

    def do_once(self, purpose: str, work: Callable[..., object], *arguments: object) -> None:
        """Rank 0 does `work(*arguments)`, and the others wait for it."""
        with self.by_first(purpose) as mine:
            if mine:
                work(*arguments)

    def cores(self) -> int:
        """How many cores this rank may use for itself."""
        return len(os.sched_getaffinity(0))

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: the others raise."""

    @contextmanager
    def told(self) -> Iterator[None]:
        """The others are told of an error inside: see `fail`."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def close(self) -> None:
        """Leave the group."""


ALONE = Group()


class HostGroup(Group):
    """Several processes of one host.

    Args:
        name: the same in all ranks of this group and in no other group of this host.
        rank, size: of this process; rank 0 is the first.
        timeout: seconds within which all must have come.
        patience: see `PATIENCE`.

    Raises:
        RankFailed: not all came; names who is missing.
        ValueError: they do not agree on the size.
    """

    def __init__(self, name: str, rank: int, size: int, timeout: float = 300.0, patience: float = PATIENCE) -> None:
        self.rank, self.size, self._patience = rank, size, patience
        deadline = time.monotonic() + timeout
        # An abstract name: it is in no file system, and goes with the socket.
        address = f"\0megatrain_verl.{os.getuid()}.{name}"
        meet = _invite if rank == 0 else _accept_invitation
        self._files, sockets = meet(address, rank, size, deadline)
        self.control = ControlPage(self._files[0], rank, size)
        self.control.set(Counter.PID, os.getpid())
        self._liveness = Liveness(self.control, sockets, patience, rank, size)
        self._others = [other for other in range(size) if other != rank]
        self._gathers = self._updates = 0
        self.gather([], "the start")

    # ------------------------------------------------------------------------------------------------- memory

    def share_arenas(self, nbytes: int) -> None:
        sizes = self.gather([nbytes], "the sizes of the arenas")
        if any(other != [nbytes] for other in sizes):
            raise ValueError(f"the ranks have different models or options: their arenas have {sizes} bytes")
        self.arenas = SharedFile(self._files[1], nbytes, self.rank, self.size)
        self.gather([], "the arenas' memory")

    def shared_mailboxes(self, kind: str, nbytes: int) -> SharedFile:
        """Memory of the host for the mailboxes of all ranks; `kind` is one of `FILES`. Every rank calls it, once."""
        return SharedFile(self._files[FILES.index(kind)], nbytes, self.rank, self.size)

    # -------------------------------------------------------------------------------------------------- waits

    def gather(self, values: list[float], purpose: str) -> list[list[float]]:
        self._gathers += 1
        number = self._gathers
        self.control.put_values(number, values, purpose)
        self.control.set(Counter.ARRIVED, number)

        self.wait_counts(Counter.ARRIVED, number, purpose)
        purposes = self.control.purposes(number)
        if len(set(purposes)) > 1:
            found = ", ".join(f"rank {rank} for {each}" for rank, each in enumerate(purposes))
            raise RuntimeError(f"the ranks wait for different things ({found}): call the same methods in all of them")
        return self.control.values(number, len(values))

    def wait_for(self, event: Event, purpose: str) -> None:
        self.wait(event.query, self._behind, purpose)
        event.synchronize()  # raises what the queue's work raised

    def wait_counts(self, counter: Counter, least: int, purpose: str) -> None:
        """Block until the count of every rank is at least `least`."""
        missing = partial(self._below, counter, least)
        self.wait(lambda: not missing(), missing, purpose)

    def updated(self) -> None:
        self.control.add(Counter.UPDATED)

    def wait_updated(self, count: int, purpose: str) -> None:
        # Another thread of the other ranks updates: their training thread may well stand still meanwhile.
        missing = partial(self._below, Counter.UPDATED, count)
        self.wait(lambda: not missing(), missing, purpose, sign=Counter.FINISHED)

    def follow(self, finished: Callable[[], int]) -> None:
        self._liveness.finished.append(finished)

    def wait(
        self,
        done: Callable[[], bool],
        late: Callable[[], list[int]],
        purpose: str,
        *,
        sign: Counter = Counter.ACTIVITY,
    ) -> None:
        """Block until `done`; `late` are the ranks that this one waits for, and `sign` grows while they go on.

        Where no rank is late, this one waits for work of its own, which the others watch.

        Raises:
            RankFailed: a rank has died or had an error, or a late one stands still, has left, or takes `LONGEST_WAIT`.
        """
        start, pause = time.monotonic(), 20e-6
        with self._excused(lambda: bool(late())):
            while not done():
                self.check()
                waited = time.monotonic() - start
                if waited > self._patience:
                    self._judge(late(), waited, purpose, sign)
                time.sleep(pause)
                pause = min(2 * pause, 250e-6)
        self.check()

    def long_work(self) -> AbstractContextManager[None]:
        """Inside, this rank may stand still for longer than `PATIENCE`: it waits for a file."""
        return self._excused(lambda: True)

    @contextmanager
    def _excused(self, whether: Callable[[], bool]) -> Iterator[None]:
        self._liveness.trains_here()
        before, self._liveness.excused = self._liveness.excused, whether
        try:
            yield
        finally:
            self._liveness.excused = before

    @contextmanager
    def by_first(self, purpose: str) -> Iterator[bool]:
        with self.long_work():
            with self.told():
                yield self.rank == 0
            self.gather([], purpose)

    def cores(self) -> int:
        mine = os.sched_getaffinity(0)
        masks = self.gather([float(zlib.crc32(str(sorted(mine)).encode()))], "their processors")
        return max(1, len(mine) // masks.count(masks[self.rank]))

    def check(self) -> None:
        """Raise if a rank has failed."""
        failure = self.control.failure()
        if failure is not None:
            raise RankFailed(failure)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, RankFailed):  # whoever found that has told it
            self.control.fail(self.rank, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Leave. The others may go on as long as they wait for nothing of this rank."""
        self._liveness.close()
        self.control.close()
        for file in self._files:
            os.close(file)

    def _below(self, counter: Counter, least: int) -> list[int]:
        counts = self.control.of_all(counter)
        return [rank for rank in self._others if counts[rank] < least]

    def _behind(self) -> list[int]:
        counts = [self.control.of_all(counter) for counter in OF_DEVICE]
        return [rank for rank in self._others if any(count[rank] < count[self.rank] for count in counts)]

    def _judge(self, late: list[int], waited: float, purpose: str, sign: Counter) -> None:
        for rank in late:
            if self.control.get(Counter.LEFT, rank):
                self.control.fail(rank, f"it has ended, and rank {self.rank} waits for {purpose}")
            elif self._liveness.unchanged_seconds(sign, rank) > self._patience:
                how = self._liveness.idle(sign, rank)
                self.control.fail(rank, f"{how}, and rank {self.rank} waits for {purpose}")
            elif waited > LONGEST_WAIT:
                self.control.fail(rank, f"rank {self.rank} has waited {waited:.0f} s for {purpose}")
        self.check()


FILES = ("control", "arenas", "gradient mailboxes", "weight mailboxes")
Meeting = tuple[list[int], dict[int, socket.socket]]  # the files; sockets by rank


def _invite(address: str, rank: int, size: int, deadline: float) -> Meeting:
    """What rank 0 does: make the files, and give them to every other rank."""
    # Names that /proc/PID/maps shows; they need not be unique.
    files = [os.memfd_create(f"{address[1:200]} {kind}", os.MFD_CLOEXEC) for kind in FILES]
    sockets: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(size)
        while len(sockets) < size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = listener.accept()[0]
            except TimeoutError as error:
                missing = [other for other in range(1, size) if other not in sockets]
                raise RankFailed(f"ranks {missing} of {size} have not come in time") from error
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if not _is_ours(connection):
                connection.close()
                continue
            hello = connection.recv(HELLO.size)
            if len(hello) < HELLO.size:  # it has ended already
                connection.close()
                continue
            other, other_size = HELLO.unpack(hello)
            if other_size != size or other in sockets:
                raise ValueError(f"rank {other} of {other_size} came to a group of {size} with {sorted(sockets)}")
            sockets[other] = connection
        ControlPage(files[0], rank, size)  # has its size before anybody maps it
        for connection in sockets.values():
            socket.send_fds(connection, [b"."], files)
    return files, sockets


def _accept_invitation(address: str, rank: int, size: int, deadline: float) -> Meeting:
    """What the other ranks do."""
    connection = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(address)
            break
        except ConnectionRefusedError as error:
            if time.monotonic() > deadline:
                raise RankFailed(f"rank 0 of {size} has not come in time") from error
            time.sleep(0.02)
    if not _is_ours(connection):
        raise RankFailed("the socket of rank 0 belongs to another user")
    connection.sendall(HELLO.pack(rank, size))
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        _, files, _, _ = socket.recv_fds(connection, 1, len(FILES))
    except TimeoutError as error:
        raise RankFailed(f"not all of {size} ranks have come in time") from error
    if len(files) != len(FILES):
        raise RankFailed("rank 0 ended while the ranks met")
    return files, {0: connection}


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()
