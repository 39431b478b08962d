"""The folder a run writes to: it must be writable, and belongs to one run at a time."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK, LOG = ".run.lock", "sft.log"
OPTION = "trainer.default_local_dir"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make `folder`, hold its lock and copy Python's log to its `sft.log` until the block ends.

    The kernel frees the lock when the process ends, however it ends.

    Raises:
        ValueError: the folder cannot be written, or another run holds it; names that run's process.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        log = logging.FileHandler(folder / LOG)
    except OSError as error:
        raise ValueError(f"{OPTION}={folder} cannot be written ({error.strerror}); set it to another folder") from error
    log.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
    logging.getLogger().addHandler(log)
    try:
        _lock(lock, folder)
        yield
    finally:
        logging.getLogger().removeHandler(log)
        log.close()
        os.close(lock)


def _lock(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
        raise ValueError(
            f"{OPTION}={folder} is in use by another run ({holder}); wait for its end or set another folder"
        ) from None
    except OSError as error:  # a file system without locks
        logging.getLogger(__name__).warning("%s cannot be locked (%s): start one run in it at a time", folder, error)
        return
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
