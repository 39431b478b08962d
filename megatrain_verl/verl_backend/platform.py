"""A CPU platform for verl 0.9.1 (`VERL_PLATFORM=cpu`): the whole trainer without an accelerator.

verl's platforms are accelerators: it asks the platform for a `torch.cuda`-like module, a device index and a Ray
resource. Here the module says that nothing is allocated, the "device index" is "cpu" (verl passes it to `tensor.to`),
and the Ray resource is a GPU that Ray is told to have (`+ray_kwargs.ray_init.num_gpus=1`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

MEMORY_FIGURES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
NO_EFFECT = (
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "set_device",
    "manual_seed",
    "manual_seed_all",
)


def register() -> None:
    """Make the platform known to verl under the name "cpu"."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)


def _device_module() -> ModuleType:
    """What `torch.cuda` is to verl's CUDA platform. Nothing runs asynchronously, so there is nothing to wait for."""
    module = ModuleType("megatrain_verl_cpu_device")
    functions: dict[str, Any] = {name: lambda *_: 0 for name in MEMORY_FIGURES}
    functions |= {name: lambda *_: None for name in NO_EFFECT}
    functions |= {name: getattr(torch.cpu, name) for name in ("Event", "Stream", "stream", "current_stream")}
    functions |= {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "device": lambda *_: torch.device("cpu"),
        "mem_get_info": lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


class PlatformCPU(PlatformBase):
    """One CPU device; collectives over gloo; weights to the rollout through shared memory."""

    _device_module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never chosen by itself, only by VERL_PLATFORM=cpu

    def current_device(self) -> str:  # type: ignore[override]
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return

    def synchronize(self, device_index: int | None = None) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return

    def empty_cache(self) -> None:
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return

    def profiler_stop(self) -> None:
        return

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
