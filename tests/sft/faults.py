"""What happens to a run in the middle: called in its process before it starts (`before` of `RunServer`)."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


def stand_still(folder: str) -> None:
    """A rank that says that it is there and does nothing more."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(1000)


def kill_in_optimizer_step(step: int) -> None:
    """SIGKILL while AdamW of `step` has updated some units and not others."""
    from megatrain_verl.streaming.host_adamw import HostAdamW

    update = HostAdamW.update

    def killed(self: HostAdamW, unit: Any, settings: Any) -> None:
        if settings.step == step and unit.plan.name == "layers.1":
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, unit, settings)

    HostAdamW.update = killed


def send(signal_and_step: list[int]) -> None:
    """One signal in the middle of a training step."""
    number, step = signal_and_step
    sent = []

    def signal_once(loss: torch.Tensor) -> torch.Tensor:
        if not sent:
            sent.append(os.kill(os.getpid(), number))
        return loss

    _change_loss([step], signal_once)


def nan_gradient(steps: list[int]) -> None:
    """The loss of these training steps is not a number, and so is every gradient."""

    def spoil(loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan")

    _change_loss(steps, spoil)


def out_of_memory(step: int) -> None:
    """The device's allocator refuses in the forward pass of training step `step`, as CUDA's does."""

    def refuse(loss: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    _change_loss([step], refuse)


def _change_loss(steps: list[int], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from megatrain_verl.verl_backend.engine import MegaTrainEngine

    run_batch, calls = MegaTrainEngine.forward_backward_batch, []

    def changed(self: MegaTrainEngine, data: Any, loss_function: Callable, forward_only: bool = False) -> Any:
        def loss(**arguments: Any) -> tuple[torch.Tensor, dict]:
            value, metrics = loss_function(**arguments)
            return change(value), metrics

        calls.extend([] if forward_only else [None])
        is_changed = not forward_only and len(calls) in steps
        return run_batch(self, data, loss if is_changed else loss_function, forward_only)

    MegaTrainEngine.forward_backward_batch = changed


def read_only(folder: str) -> None:
    """Mount `folder` read-only for this process."""
    _own_mounts()
    _mount(folder, folder, None, MS_BIND, None)
    _mount(None, folder, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None)


def small_shared_memory(size: str) -> None:
    """A /dev/shm of `size` for this process."""
    _own_mounts()
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, f"size={size}")


def _own_mounts() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _mount("none", "/", None, MS_REC | MS_PRIVATE, None)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind)]
    options = None if data is None else data.encode()
    if ctypes.CDLL(None, use_errno=True).mount(*arguments, ctypes.c_ulong(flags), options):
        raise OSError(ctypes.get_errno(), f"mount {target}")
