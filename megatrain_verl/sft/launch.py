"""One process per device of this host, each a rank of the same run."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL
from multiprocessing.process import BaseProcess
from typing import Any

from megatrain_verl.sft.process import ONE_HOST

GRACE = 45.0  # seconds in which the other ranks find out that one has failed, and end
PR_SET_PDEATHSIG = 1  # of prctl: what the kernel sends when the parent ends
# The error by which a rank learns of another one's failure says less than that failure.
SECONDARY = "RankFailed"


def run_ranks(train: Callable[..., None], arguments: tuple[Any, ...], devices: list[str]) -> None:
    """`train(*arguments)` in one process per device; returns when all have ended, and leaves none behind.

    A SIGTERM or SIGINT (Ctrl-C) is passed on to all of them as SIGTERM.

    Args:
        train: of a module that can be imported.
        arguments: what can be pickled.
        devices: as in CUDA_VISIBLE_DEVICES, one for each rank.

    Raises:
        ValueError: a rank raised one.
        RuntimeError: a rank failed otherwise; names it.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        previous = {
            number: signal.signal(number, lambda *_: [process.terminate() for process in processes])
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            errors = []
            for rank, device in enumerate(devices):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(train, arguments, rank, os.getpid(), sender))
                with _environment(rank, len(devices), device, folder):
                    process.start()
                sender.close()
                processes.append(process)
                errors.append(receiver)
            order = _wait(processes)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            for process in processes:
                process.kill()
                process.join()
        _raise_first([_error(rank, processes[rank], errors[rank]) for rank in order])


@contextmanager
def _environment(rank: int, size: int, device: str, folder: str) -> Iterator[None]:
    """What torch.distributed, verl and CUDA read when they are imported. The ranks meet in a file, by no port."""
    before = dict(os.environ)
    method = f"file://{folder}/process_group?rank={rank}&world_size={size}"
    os.environ.update(ONE_HOST, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    # verl takes LOCAL_RANK for the number of the device whose nearest processors it uses.
    os.environ.update(CUDA_VISIBLE_DEVICES=device, LOCAL_RANK=device or "0", DIST_INIT_METHOD=method)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank(
    train: Callable[..., None],
    arguments: tuple[Any, ...],
    rank: int,
    parent: int,
    sender: multiprocessing.connection.Connection,
) -> None:
    CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent says what follows
    if os.getppid() != parent:  # it has ended meanwhile
        sys.exit(1)
    if rank > 0:  # the first one speaks for all
        sys.stdout = open(os.devnull, "w")
    try:
        train(*arguments)
    except Exception as error:
        traceback.print_exc()
        sender.send((type(error).__name__, str(error)))
        sys.exit(1)


def _wait(processes: list[BaseProcess]) -> list[int]:
    """Until all have ended, or `GRACE` after one has failed; their numbers in the order in which they ended."""
    ended: list[int] = []
    deadline = None
    while len(ended) < len(processes):
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        running = {process.sentinel: rank for rank, process in enumerate(processes) if rank not in ended}
        now = [running[sentinel] for sentinel in multiprocessing.connection.wait(list(running), timeout)]
        if not now:
            break
        for rank in now:
            processes[rank].join()
        ended += sorted(now, key=lambda rank: processes[rank].exitcode)  # killed ones first: the others follow them
        if deadline is None and any(processes[rank].exitcode for rank in now):
            deadline = time.monotonic() + GRACE
    return ended + [rank for rank in range(len(processes)) if rank not in ended]


def _error(rank: int, process: BaseProcess, receiver: multiprocessing.connection.Connection) -> tuple[str, str] | None:
    """(class, message) of how a rank failed; None if it did not."""
    if receiver.poll():
        try:
            return receiver.recv()
        except EOFError:  # it has sent nothing
            pass
    if process.exitcode == 0:
        return None
    ended = f"was ended by signal {-process.exitcode}" if process.exitcode < 0 else f"ended with {process.exitcode}"
    return "RuntimeError", f"rank {rank} (process {process.pid}) {ended}"


def _raise_first(errors: list[tuple[str, str] | None]) -> None:
    failed: list[tuple[str, Any]] = [error for error in errors if error is not None]
    if not failed:
        return
    name, message = min(failed, key=lambda error: error[0] == SECONDARY)
    raise ValueError(message) if name == "ValueError" else RuntimeError(f"{name}: {message}")
