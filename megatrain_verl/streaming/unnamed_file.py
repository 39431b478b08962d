"""A file without a name: its space is free again when the process ends, however it ends."""

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 8  # one thread that reads does not keep a disk busy
PART_BYTES = 16 << 20  # read at once by one thread
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class UnnamedFile:
    """`nbytes` in `folder`, which is made if it does not exist.

    Args:
        option: names the folder in errors.

    Raises:
        ValueError: the folder cannot be written to or is in memory, or its file system has too little room.
    """

    def __init__(self, folder: str, nbytes: int, option: str) -> None:
        self.nbytes, self._label = nbytes, f"{option}={folder}"
        try:
            os.makedirs(folder, exist_ok=True)
            if (kind := _file_system(folder)) in IN_MEMORY:
                raise self._unusable(f"it is in memory ({kind})")
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
        except OSError as error:
            raise self._unusable(f"no file can be made there: {error}") from error
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            self._file.close()
            raise self._unusable(f"the file takes {nbytes / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free there")
        self._threads = ThreadPoolExecutor(THREADS, option)

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` (bytes) at `offset`.

        Raises:
            ValueError: it cannot be written, on a full disk for one.
        """
        try:
            while data:
                count = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise self._unusable(f"byte {offset} of {self.nbytes} cannot be written there: {error}") from error

    def sync(self) -> None:
        """Wait until the disk has all that was written; errors as in `write`."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise self._unusable(f"what was written there is lost: {error}") from error

    def read(self, data: memoryview, offset: int) -> None:
        """Fill `data` from `offset` on.

        Raises:
            EOFError: the file is shorter.
            OSError: the disk cannot be read.
        """
        parts = range(0, len(data), PART_BYTES)
        list(self._threads.map(lambda part: self._read(data[part : part + PART_BYTES], offset + part), parts))

    def close(self) -> None:
        """Give the space back."""
        self._threads.shutdown()
        self._file.close()

    def _read(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.preadv(self._file.fileno(), [data], offset)
            if count == 0:
                raise EOFError(f"{self._label}: the file there ends at byte {offset} of {self.nbytes}")
            data, offset = data[count:], offset + count

    def _unusable(self, why: str) -> ValueError:
        return ValueError(f"{self._label}: {why}; name a folder on a fast disk of this host, or leave it out")


def _file_system(folder: str) -> str | None:
    """Kind of the file system of `folder`, as proc_pid_mountinfo(5) lists it."""
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return next((line[line.index("-") + 1] for line in lines if line[2] == device), None)
