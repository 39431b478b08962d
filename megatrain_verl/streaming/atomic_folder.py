"""A folder that appears whole or not at all, whatever kills the process or fills the disk while it is written."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# linux/fcntl.h, linux/fs.h
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Write into the folder that this yields; on success it becomes `path`, replacing what was there.

    Until then it is `.NAME.partial` beside `path`, which nothing reads. Everything is on the disk before the folder
    takes its name. After an error it is removed and `path` is as before; what a killed process left is removed by the
    next save to the same path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    restore_replaced(path)
    partial = _sibling(path, "partial")
    _remove(partial)
    partial.mkdir()
    try:
        yield partial
        _sync_tree(partial)
        _move_into_place(partial, path)
    finally:
        _remove(partial)


def restore_replaced(path: str | Path) -> None:
    """Undo a replacement of `path` that was killed between its two renames (see `_move_into_place`).

    For readers too: call it before looking at `path`.
    """
    path, replaced = Path(path), _sibling(Path(path), "replaced")
    if not replaced.exists():
        return
    if path.exists():
        _remove(replaced)
    else:
        replaced.rename(path)


def check_disk_space(path: str | Path, nbytes: int) -> None:
    """Refuse to start writing `nbytes` to `path` where they cannot fit; what `path` holds now is kept meanwhile.

    Raises:
        ValueError: names the folder, what it needs and what is free.
    """
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise ValueError(
            f"saving to {path} takes {nbytes / 2**30:.2f} GiB, the file system has {free / 2**30:.2f} GiB free; "
            "delete old checkpoints or save elsewhere"
        )


def _move_into_place(partial: Path, path: Path) -> None:
    if not path.exists():
        partial.rename(path)
    elif not _exchange(partial, path):
        # Not every file system can swap two folders (NFS cannot). A kill between these two lines leaves no `path`;
        # `restore_replaced` then brings the old one back.
        path.rename(_sibling(path, "replaced"))
        partial.rename(path)
    _sync(path.parent)
    _remove(_sibling(path, "replaced"))


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step; False if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _sibling(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
