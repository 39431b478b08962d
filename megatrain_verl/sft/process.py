"""The environment of training processes that no launcher has started, and how they meet."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from verl.utils.device import get_device_name, get_nccl_backend

ONE_HOST = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",  # verl wants one; nothing listens there, since the process group meets in a file
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
SINGLE_PROCESS = ONE_HOST | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


@contextmanager
def single_process() -> Iterator[None]:
    """Set what torch.distributed and verl read from the environment, unless a launcher such as torchrun has set it.

    The process group of one meets in a temporary file, so no port is opened.
    """
    if "RANK" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, value in SINGLE_PROCESS.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("DIST_INIT_METHOD", f"file://{folder}/process_group?rank=0&world_size=1")
        yield


def meet() -> None:
    """Make the process group as verl does, but leave the device to CUDA_VISIBLE_DEVICES.

    It carries a few numbers per step; weights and gradients go other ways.
    """
    backend = f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"
    torch.distributed.init_process_group(backend, init_method=os.environ.get("DIST_INIT_METHOD"))


def device() -> str:
    """The name of verl's device here: "cpu" with VERL_PLATFORM=cpu, else "cuda".

    Raises:
        ValueError: there is no CUDA device, and the CPU platform was not asked for.
    """
    name = get_device_name()
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; set the environment variable VERL_PLATFORM=cpu to train on CPU")
    return name
