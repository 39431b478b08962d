"""Forks that are killed, or find the disk full, at a chosen change of the files in a folder (see write_points.c)."""

import ctypes
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

COUNT, KILL, FULL = range(3)
SOURCE = Path(__file__).with_name("write_points.c")
LIBRARY = "WRITE_POINTS_LIBRARY"


def compile_library(folder: Path) -> Path:
    """The library to preload; raises CalledProcessError if the C compiler fails."""
    library = folder / "write_points.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class WritePoints:
    """The preloaded library, in a process that was started with LD_PRELOAD and `LIBRARY` naming it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.write_points_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
        self._library.write_points_count.restype = ctypes.c_long
        self._library.write_points_name.restype = ctypes.c_char_p

    def list(self, folder: Path, work: Callable[[], None], *, swaps: bool) -> list[str]:
        """Every change that `work` makes below `folder`: the call, a "+" if it takes space, and the path."""
        lines = folder.parent / "points"

        def counted() -> None:
            self._library.write_points_arm(os.fsencode(folder), COUNT, 0, swaps)
            work()
            names = [self._library.write_points_name(n + 1).decode() for n in range(self._library.write_points_count())]
            lines.write_text("\n".join(names))

        status, printed = in_fork(counted)
        assert status == 0, printed
        return lines.read_text().split("\n")

    def fail(self, folder: Path, work: Callable[[], None], action: int, point: int, *, swaps: bool) -> tuple[int, str]:
        """Run `work` with `action` at change number `point` (from 1): its exit status and what it printed."""

        def armed() -> None:
            self._library.write_points_arm(os.fsencode(folder), action, point, swaps)
            work()

        return in_fork(armed)


def in_fork(work: Callable[[], None], seconds: int = 60) -> tuple[int, str]:
    """Run `work` in a fork of this process; (0 or 1 after an exception or minus the signal, what it printed)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.dup2(writer, 1), os.dup2(writer, 2)
        signal.alarm(seconds)  # a fork that hangs ends by SIGALRM
        try:
            work()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        printed = stream.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed
