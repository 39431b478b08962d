"""The calls of the CUDA driver that torch does not offer: memory between processes, and waits of a stream for a count.

A stream that waits for a count in shared host memory, and one that writes it, order the work of the devices of several
processes without the host. All calls act on the context of the calling thread, which torch has made.
"""

import ctypes
import functools

import torch

IPC_HANDLE_BYTES = 64
SHARED_BLOCK = 2 << 20  # bytes: the driver puts smaller allocations into one block, which is shared as a whole
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class CudaDriverError(RuntimeError):
    """A call of the driver failed."""


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        raise CudaDriverError(f"{name} failed: {text.value.decode() if text.value else status}")


def make_context() -> None:
    """Give the calling thread the context of torch, if it has not used CUDA yet. Waits for its current stream."""
    torch.cuda.current_stream().synchronize()


def allocate(nbytes: int) -> int:
    """Address of `nbytes` on the current device, outside of torch's allocator, whose blocks are no other process's."""
    make_context()
    address, whole = ctypes.c_uint64(), -(-nbytes // SHARED_BLOCK) * SHARED_BLOCK
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
    return address.value


def free(address: int) -> None:
    """Free what `allocate` gave."""
    _call("cuMemFree_v2", ctypes.c_uint64(address))


def share(address: int) -> bytes:
    """The handle by which other processes open what `allocate` gave."""
    handle = IpcHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle.reserved)


def open_shared(handle: bytes) -> int:
    """Address in this process of memory on another device that another process shares.

    Raises:
        CudaDriverError: the devices have no access to each other.
    """
    address = ctypes.c_uint64()
    value = IpcHandle((ctypes.c_ubyte * IPC_HANDLE_BYTES)(*handle))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, ctypes.c_uint(LAZY_PEER_ACCESS))
    return address.value


def close_shared(address: int) -> None:
    """Close what `open_shared` opened."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def copy(target: int, source: int, nbytes: int, stream: torch.cuda.Stream) -> None:
    """Copy between any two addresses of devices and page-locked host memory, on `stream`."""
    arguments = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
    _call("cuMemcpyAsync", *arguments, ctypes.c_void_p(stream.cuda_stream))


def wait_count(stream: torch.cuda.Stream, address: int, least: int) -> None:
    """What follows on `stream` waits until the int64 at `address` (of the device) is `least` or more."""
    arguments = ctypes.c_uint64(address), ctypes.c_uint64(least), ctypes.c_uint(AT_LEAST)
    _call("cuStreamWaitValue64_v2", ctypes.c_void_p(stream.cuda_stream), *arguments)


def write_count(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """`stream` writes an int64 to `address` (of the device), after all that was on it before, seen by everybody."""
    arguments = ctypes.c_uint64(address), ctypes.c_uint64(value), ctypes.c_uint(0)
    _call("cuStreamWriteValue64_v2", ctypes.c_void_p(stream.cuda_stream), *arguments)


def map_host(address: int, nbytes: int) -> int:
    """Page-lock host memory; returns its address on the device."""
    make_context()
    status = torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE_AND_MAPPED)
    if int(status) != 0:
        raise CudaDriverError(f"cudaHostRegister failed with CUDA error {int(status)}")
    mapped = ctypes.c_uint64()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), ctypes.c_void_p(address), ctypes.c_uint(0))
    return mapped.value


def unmap_host(address: int) -> None:
    """Unlock what `map_host` locked."""
    torch.cuda.cudart().cudaHostUnregister(address)


class DeviceArray:
    """Memory that `allocate` gave, for `torch.as_tensor`: `nbytes` of uint8."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
