"""The one place where host memory is allocated: private huge pages, or the pages of a memfd that processes share."""

import ctypes
import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
POPULATED_AT_ONCE = 64 << 20  # bytes, by one thread


class SharedFile:
    """A memfd that several processes map whole. Each takes the same blocks from it in the same order.

    It has no name in a file system and its memory goes with the last process that maps it. Blocks have no pages until
    they are taken, so the file may be larger than needed. /dev/shm and its size play no part.

    Args:
        fd: of the memfd; the caller's, who may close it.
        nbytes: most bytes that will be taken, the same in each process.
        rank, size: which of the processes this is: each touches its part of every block.

    Raises:
        MemoryError: the kernel refuses the file.
    """

    def __init__(self, fd: int, nbytes: int, rank: int = 0, size: int = 1) -> None:
        self._rank, self._size, self._taken = rank, size, 0
        try:
            os.ftruncate(fd, max(nbytes, mmap.PAGESIZE))  # to the same size in each process
            self._mapped = mmap.mmap(fd, max(nbytes, mmap.PAGESIZE), mmap.MAP_SHARED)
        except OSError as error:
            raise MemoryError(f"cannot map {nbytes / 2**30:.2f} GiB of shared memory: {error}") from error
        self._fd = os.dup(fd)

    def take(self, nbytes: int, label: str) -> Tensor:
        """The next block, zeroed, as a flat uint8 tensor. This process's part of it has its pages, which are near it.

        Raises:
            MemoryError: the file is used up, or the kernel has no more pages.
        """
        start, length = self._taken, padded(nbytes)
        if start + length > len(self._mapped):
            raise MemoryError(f"the shared memory of {len(self._mapped)} bytes has no room for {label}")
        self._taken += length
        pages = length // mmap.PAGESIZE
        first, last = (pages * part // self._size * mmap.PAGESIZE for part in (self._rank, self._rank + 1))
        try:
            self._populate(start + first, last - first)
        except OSError as error:
            size = f"{nbytes / 2**30:.2f} GiB"
            raise MemoryError(f"cannot allocate {size} of host memory for {label} (shared): {error}") from error
        return torch.frombuffer(self._mapped, dtype=torch.uint8, offset=start, count=length)[:nbytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that have memory, whoever touched them."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Drop this object's references; the memory goes when no tensor of any process uses it any more."""
        os.close(self._fd)

    def _populate(self, start: int, length: int) -> None:
        """Give the pages memory now: a later write to a page for which there is none would kill the process."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        base = torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr()

        def touch(offset: int) -> None:
            part = min(POPULATED_AT_ONCE, start + length - offset)
            if libc.madvise(base + offset, part, MADV_POPULATE_WRITE) != 0:
                number = ctypes.get_errno()
                if number != errno.EINVAL:
                    raise OSError(number, os.strerror(number))
                os.posix_fallocate(self._fd, offset, part)  # an older kernel

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(touch, range(start, start + length, POPULATED_AT_ONCE)))


def padded(nbytes: int) -> int:
    """Bytes of a block of `nbytes` in a `SharedFile`."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class HostBuffer:
    """A zeroed, touched block of host memory, seen as a flat uint8 tensor; page-locked for CUDA where asked.

    `cudaHostRegister` locks memory in place; `pin_memory` would round the size up to a power of two and is 5-10
    times slower. Private blocks ask for huge pages; shared memory has none on stock kernels.

    Raises:
        MemoryError: the kernel refuses the block; the message names `label` and the size.
    """

    def __init__(self, nbytes: int, label: str, *, register: bool, shared: SharedFile | None = None) -> None:
        self.nbytes, self.label = nbytes, label
        self.tensor: Tensor = _private(nbytes, label) if shared is None else shared.take(nbytes, label)
        self._unlock: weakref.finalize | None = None
        if register and nbytes > 0:
            address = self.tensor.data_ptr()
            _cuda("cudaHostRegister", address, nbytes, 1)  # 1 = cudaHostRegisterPortable
            # Also of a buffer that nobody has closed: CUDA would take the next one at its address for this one.
            self._unlock = weakref.finalize(self, _cuda, "cudaHostUnregister", address)
            self._unlock.atexit = False

    def view(self, dtype: torch.dtype) -> Tensor:
        """The block as a flat tensor of `dtype`."""
        return self.tensor.view(dtype)

    def close(self) -> None:
        """Unlock the pages and drop this object's references; the memory goes when no tensor uses it any more."""
        if self._unlock is not None:
            self._unlock()
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _private(nbytes: int, label: str) -> Tensor:
    size = max(nbytes, mmap.PAGESIZE)
    try:
        mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= 2 * HUGE_PAGE:
            mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size / 2**30:.2f} GiB of host memory for {label}: {error}") from error
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)[:nbytes]
    return tensor.zero_()  # touches every page, on all threads


def _cuda(function: str, *args: int) -> None:
    status = getattr(torch.cuda.cudart(), function)(*args)
    if int(status) != 0:
        raise RuntimeError(f"{function} failed with CUDA error {int(status)}; check `ulimit -l` and free host memory")
