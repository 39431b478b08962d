"""Run a command with a time limit and leave no process of it behind: `python bounded_run.py SECONDS COMMAND...`

Ray starts its servers, and vLLM its engine, in sessions of their own: ending the command's process group is not enough.
This process makes itself the parent of every orphan below it (Linux' child subreaper), so that whatever the command
has started stays its descendant and is ended by process id. Shared memory that they leave in /dev/shm is removed (a
killed vLLM worker leaves its queues). Exit status: the command's, 124 after the time limit.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

PR_SET_CHILD_SUBREAPER = 36
GRACE_SECONDS = 10.0
TIMED_OUT = 124
LOOK_SECONDS = 2.0  # between two looks at the shared memory of the descendants
SHARED_MEMORY = Path("/dev/shm")


def adopt_orphans() -> None:
    """Make this process the new parent of orphaned descendants.

    Raises:
        OSError: the kernel refuses; descendants could escape then.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants(grace_seconds: float = GRACE_SECONDS) -> int:
    """Ask every descendant to end, kill what is left after `grace_seconds`; returns how many were killed."""
    me, killed = psutil.Process(), 0
    for process in me.children(recursive=True):
        _signal(process, signal.SIGTERM)
    psutil.wait_procs(me.children(recursive=True), timeout=grace_seconds)
    while survivors := me.children(recursive=True):  # a dying process may still start or orphan another
        for process in survivors:
            _signal(process, signal.SIGKILL)
        _, alive = psutil.wait_procs(survivors, timeout=grace_seconds)
        killed += len(survivors)
        if alive:
            raise TimeoutError(f"processes {[process.pid for process in alive]} do not end")
    return killed


def segments_of(processes: list[psutil.Process]) -> set[Path]:
    """The files in /dev/shm that `processes` have mapped, found by inode: glibc maps a named semaphore under a
    temporary name, which it removes.
    """
    inodes = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue  # it has ended, or belongs to another user
        inodes |= set(map(int, re.findall(rf"\s(\d+)\s+{SHARED_MEMORY}/", maps)))
    with os.scandir(SHARED_MEMORY) as files:
        return {Path(file) for file in files if file.inode() in inodes}


def run(command: list[str], limit_seconds: float) -> int:
    """Run `command` for at most `limit_seconds`; returns its exit status, or 124 if the time was up."""
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    earlier, segments = set(SHARED_MEMORY.iterdir()), set()
    try:
        end = time.monotonic() + limit_seconds
        process = subprocess.Popen(command)
        while time.monotonic() < end:
            try:
                return process.wait(timeout=min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                segments |= segments_of(psutil.Process().children(recursive=True))
        print(f"bounded_run: no end after {limit_seconds:.0f} s, stopping it", file=sys.stderr)
        return TIMED_OUT
    finally:
        end_descendants()
        for segment in segments - earlier - segments_of(list(psutil.process_iter())):
            segment.unlink(missing_ok=True)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass  # it ended by itself


def _interrupt(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:], float(sys.argv[1])))
