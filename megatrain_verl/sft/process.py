"""The environment of one training process that no launcher has started."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from verl.utils.device import get_device_name

SINGLE_PROCESS = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",  # verl wants one; nothing listens there, since the process group meets in a file
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


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


def device() -> str:
    """The name of verl's device here: "cpu" with VERL_PLATFORM=cpu, else "cuda".

    Raises:
        ValueError: there is no CUDA device, and the CPU platform was not asked for.
    """
    name = get_device_name()
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; set the environment variable VERL_PLATFORM=cpu to train on CPU")
    return name
