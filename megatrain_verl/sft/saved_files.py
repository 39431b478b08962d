"""Files of verl's that a resumed run depends on, checked before verl reads them."""

import pickle
from pathlib import Path

import torch

from megatrain_verl.streaming.atomic_folder import restore_replaced
from megatrain_verl.verl_backend.retention import STEP_FOLDER, TRACKER

LOADER_STATE = "data_0.pt"
UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError)
REMEDY = (
    "set trainer.resume_mode=resume_path and trainer.resume_from_path to a whole checkpoint, or resume_mode=disable"
)


def check_tracker(folder: Path) -> None:
    """Refuse an output folder whose tracker names no checkpoint: verl would start afresh and overwrite what is there.

    Raises:
        ValueError: names the tracker and what it says.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return
    step = tracker.read_bytes().decode(errors="replace").strip()
    if not step.isdecimal():
        raise ValueError(f"{tracker} names no step but {step[:40]!r}; {REMEDY}")
    checkpoint = folder / f"{STEP_FOLDER}{step}"
    restore_replaced(checkpoint)
    if not checkpoint.is_dir():
        raise ValueError(f"{tracker} names step {step}, but {checkpoint} does not exist; {REMEDY}")


def check_loader_state(folder: Path) -> None:
    """Refuse a checkpoint without the data loader's state: verl would train on the rows of the epoch's start again.

    verl unpickles the file; here it is read without running what a foreign one may hold.

    Raises:
        ValueError: the file is missing, damaged or holds more than plain values.
    """
    path = folder / LOADER_STATE
    try:
        torch.load(path, weights_only=True)
    except UNREADABLE as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged ({type(error).__name__})"
        raise ValueError(f"{path} {reason}; {REMEDY}") from error
