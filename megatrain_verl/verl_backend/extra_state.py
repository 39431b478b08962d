"""verl's checkpoint content "extra": the learning-rate schedule and the random generators, as one JSON file."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain_verl.verl_backend.optimizer import LearningRate

NAME = "extra_state.json"


def write(folder: Path, learning_rate: LearningRate) -> None:
    """Write the schedule's state and that of Python's, NumPy's and torch's generators (CPU and current GPU)."""
    numpy_state = np.random.get_state(legacy=False)
    state = {
        "learning_rate": learning_rate.state_dict(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": _to_hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }
    (folder / NAME).write_text(json.dumps(state))


def read(folder: Path) -> dict[str, Any]:
    """What `write` wrote, not yet in effect.

    Raises:
        ValueError: there is no such file or it is not complete.
    """
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"checkpoint {folder} has no {NAME}; take extra out of checkpoint.load_contents")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not complete: {error}") from error


def restore(state: dict[str, Any], learning_rate: LearningRate) -> None:
    """Put what `read` returned into effect."""
    learning_rate.load_state_dict(state["learning_rate"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_from_hex(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def _to_hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
