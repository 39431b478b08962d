"""The one place where arenas in host memory are allocated: private huge pages, or memfd pages that can be shared."""

import mmap
import os

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes


class HostBuffer:
    """A zeroed, touched block of host memory, seen as a flat uint8 tensor; page-locked for CUDA where asked.

    `cudaHostRegister` locks memory in place; `pin_memory` would round the size up to a power of two and is 5-10
    times slower. Private blocks ask for huge pages; shared memory has none on stock kernels.

    Raises:
        MemoryError: the kernel refuses the block; the message names `label` and the size.
    """

    def __init__(self, nbytes: int, label: str, *, shared: bool, register: bool) -> None:
        self.nbytes, self.label = nbytes, label
        self.fd: int | None = None
        size = max(nbytes, mmap.PAGESIZE)
        try:
            if shared:
                self.fd = os.memfd_create(label, os.MFD_CLOEXEC)
                # Reserve the pages now: a later write to a page that does not exist would kill the process (SIGBUS).
                os.posix_fallocate(self.fd, 0, size)
                mapped = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
            else:
                mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if size >= 2 * HUGE_PAGE:
                    mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if self.fd is not None:
                os.close(self.fd)
            raise MemoryError(f"cannot allocate {size / 2**30:.2f} GiB of host memory for {label}: {error}") from error
        self.tensor: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)[:nbytes]
        self.tensor.zero_()  # touches every page, on all threads
        self._registered = register and nbytes > 0
        if self._registered:
            _cuda("cudaHostRegister", self.tensor.data_ptr(), nbytes, 1)  # 1 = cudaHostRegisterPortable

    def view(self, dtype: torch.dtype) -> Tensor:
        """The block as a flat tensor of `dtype`."""
        return self.tensor.view(dtype)

    def close(self) -> None:
        """Unlock the pages and drop this object's references; the memory goes when no tensor uses it any more."""
        if self._registered:
            _cuda("cudaHostUnregister", self.tensor.data_ptr())
            self._registered = False
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _cuda(function: str, *args: int) -> None:
    status = getattr(torch.cuda.cudart(), function)(*args)
    if int(status) != 0:
        raise RuntimeError(f"{function} failed with CUDA error {int(status)}; check `ulimit -l` and free host memory")
