"""Undoes environment settings of verl and Ray that would slow the engine's process down."""

import logging
import os

import torch

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def allow_concurrent_streams() -> None:
    """Remove CUDA_DEVICE_MAX_CONNECTIONS=1, with which copies and compute of one process cannot overlap.

    CUDA reads it when it starts in the process; verl sets it for Megatron, and a shell may carry it over.
    """
    if os.environ.get(MAX_CONNECTIONS) != "1":
        return
    if torch.cuda.is_initialized():
        logger.warning(
            "%s=1 is set and CUDA has started: weight transfers will not overlap with compute, which makes a step "
            "2-3 times slower. Unset it in the shell that starts Ray.",
            MAX_CONNECTIONS,
        )
    else:
        del os.environ[MAX_CONNECTIONS]


def use_cores(threads: int) -> None:
    """Let torch use `threads` cores: Ray sets OMP_NUM_THREADS=1 in its workers.

    Applies to the calling thread; the optimizer's own thread sets its own number.
    """
    torch.set_num_threads(threads)
