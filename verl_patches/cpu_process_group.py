"""verl 0.9.1: name the process-group backend of the CPU platform once.

Reason: verl builds the backend string as f"cpu:gloo,{device}:{backend}" (`verl.utils.distributed`, two places). On the
CPU platform this is "cpu:gloo,cpu:gloo", which torch refuses because a device may have only one backend.

Patched: `torch.distributed.init_process_group` takes that one string for "cpu:gloo". Only on VERL_PLATFORM=cpu.
"""

import functools
from typing import Any

import torch.distributed

from verl_patches.guard import first_time


def apply() -> None:
    """Patch torch.distributed in this process."""
    if not first_time("cpu_process_group", torch.distributed):
        return
    init_process_group = torch.distributed.init_process_group

    @functools.wraps(init_process_group)
    def wrapper(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        return init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = wrapper
