"""Undoes environment settings of verl and Ray that would slow the engine's process down."""

import logging
import os

import torch

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def allow_concurrent_streams() -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS to 32, the most there are, unless somebody has chosen another number than 1.

    CUDA reads it when it starts in the process. With 1, which verl sets for Megatron and a shell may carry over, copies
    and compute of one process cannot overlap. With fewer connections than streams (by default there are 8) some share
    one, and a stream that waits for another GPU holds up who shares its connection; that GPU may wait for just that.
    """
    if os.environ.get(MAX_CONNECTIONS, "1") != "1":
        return
    if not torch.cuda.is_initialized():
        os.environ[MAX_CONNECTIONS] = "32"
    elif MAX_CONNECTIONS in os.environ:
        logger.warning(
            "%s=1 is set and CUDA has started: weight transfers will not overlap with compute, which makes a step "
            "2-3 times slower. Unset it in the shell that starts Ray.",
            MAX_CONNECTIONS,
        )


def use_cores(threads: int) -> None:
    """Let torch use `threads` cores: Ray sets OMP_NUM_THREADS=1 in its workers.

    Applies to the calling thread; the optimizer's own thread sets its own number.
    """
    torch.set_num_threads(threads)
