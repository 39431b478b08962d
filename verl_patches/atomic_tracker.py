"""verl 0.9.1: write `latest_checkpointed_iteration.txt` and `data*.pt` so that no crash and no full disk empties them.

Reason: the V1 trainer truncates the tracker in place after the checkpoint is complete; killed there, it leaves an
empty tracker, and the next start fails on `int("")`. The SFT trainer renames, but without fsync a power loss may
keep the rename and lose the content. Both write the data loader's state in place: where an earlier run has saved the
same step and the tracker names it, a crash leaves half a file, which the next start cannot load.

Patched: the names `open` and `torch` in both modules. Only a tracker opened for writing and `torch.save` are treated
differently: the new file is synced and then takes the old one's name.
"""

import builtins
import os
import re
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any

import torch

from verl_patches.guard import check_source, first_time
from verl_patches.import_hook import after_import

TRACKER = "latest_checkpointed_iteration.txt"
TARGETS = {
    "verl.trainer.ppo.v1.trainer_base": ("PPOTrainer", {"_save_checkpoint": "1ceb1e087ce91c92"}),
    "verl.utils.checkpoint.checkpoint_handler": ("CheckpointHandler", {"save_checkpoint": "013c4eb8b3058ebf"}),
}


def apply() -> None:
    """Patch verl's two trackers, now or when their modules are imported."""
    for target in TARGETS:
        after_import(target, _patch)


def _patch(module: ModuleType) -> None:
    if first_time("atomic_tracker", module):
        owner, sources = TARGETS[module.__name__]
        check_source("atomic_tracker", getattr(module, owner), sources)
        module.open = _open  # type: ignore[attr-defined]
        module.torch = AtomicTorch("torch")  # type: ignore[attr-defined]


def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> IO:
    is_tracker = isinstance(file, str) and re.fullmatch(rf"{re.escape(TRACKER)}(\.tmp)?", os.path.basename(file))
    if is_tracker and mode == "w":
        return AtomicTracker(file)  # type: ignore[return-value]
    return builtins.open(file, mode, *args, **kwargs)


class AtomicTracker:
    """A text file that appears under its name when the `with` block ends without an exception, and not before."""

    def __init__(self, path: str) -> None:
        self.path, self.temporary = Path(path), Path(f"{path}.new")

    def __enter__(self) -> "AtomicTracker":
        self.file = builtins.open(self.temporary, "w")
        return self

    def write(self, text: str) -> int:
        """Write the step number, once that step's folder has been synced."""
        _fsync(self.path.parent / f"global_step_{int(text)}")
        return self.file.write(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        finally:
            self.file.close()
        if kind is None:
            os.replace(self.temporary, self.path)
            _fsync(self.path.parent)
        else:
            self.temporary.unlink()


class AtomicTorch(ModuleType):
    """torch, whose `save` to a path replaces the file there in one step."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def save(self, content: object, path: str) -> None:
        """Write `content` to `path`; after an error or a kill `path` is as before."""
        temporary = Path(f"{path}.new")
        try:
            torch.save(content, temporary)
            _fsync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
