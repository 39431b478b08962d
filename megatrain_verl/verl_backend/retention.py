"""Which old checkpoints may go: never the one that verl would resume from."""

import logging
import os
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
STEP_FOLDER = "global_step_"
REMOVED = ".removed"


class Retention:
    """Remembers what this process saved and deletes the oldest beyond a limit, as verl's backends do.

    verl writes its tracker after the save, so the checkpoint before the newest may still be the one it names; that one
    stays until the next save.
    """

    def __init__(self) -> None:
        self._saved: list[Path] = []

    def register(self, path: Path, limit: int | None) -> None:
        """Count the complete checkpoint `path`, then delete the oldest so that at most `limit` (and the tracked) stay.

        `limit` None or 0 keeps all.
        """
        self._saved = [old for old in self._saved if old != path] + [path]
        if not limit:
            return
        _finish_deletions(path)
        for old in self._saved[:-limit]:
            if not _is_tracked(old):
                _delete(old)
                self._saved.remove(old)


def _step_folder(path: Path) -> Path | None:
    """verl's folder of one step, which is `path` in SFT and its parent in RL."""
    return next((part for part in (path, *path.parents) if part.name.startswith(STEP_FOLDER)), None)


def _is_tracked(path: Path) -> bool:
    folder = _step_folder(path)
    if folder is None or not (folder.parent / TRACKER).exists():
        return False
    tracker = folder.parent / TRACKER
    step = tracker.read_text().strip()
    if not step.isdigit():
        logger.warning("%s names no step (%r): no checkpoint is deleted", tracker, step)
        return True
    return folder.name == f"{STEP_FOLDER}{step}"


def _delete(path: Path) -> None:
    """Take the name away first, so that a half-deleted checkpoint cannot be taken for a whole one."""
    if path.exists():
        removed = path.with_name(f".{path.name}{REMOVED}")
        os.rename(path, removed)
        shutil.rmtree(removed)


def _finish_deletions(path: Path) -> None:
    """Delete what a killed process was about to delete beside `path`: it may be as large as a checkpoint."""
    folder = _step_folder(path)
    if folder is not None:
        root = folder.parent
        for pattern in (f"{STEP_FOLDER}*/.*{REMOVED}", f".{STEP_FOLDER}*{REMOVED}"):
            for leftover in root.glob(pattern):
                shutil.rmtree(leftover)
