"""Where verl's loggers write. verl leaves it to the environment, and without it takes folders of the working directory,
of which one is called like the project."""

import os
import time
from pathlib import Path


def metrics_path(default: Path) -> Path:
    """The file of verl's `file` logger: what the environment says, which is set to `default` if it says nothing."""
    return Path(os.environ.setdefault("VERL_FILE_LOGGER_PATH", os.path.abspath(default)))


def use_output_folder(folder: str) -> None:
    """Let verl's `tensorboard` and `wandb` loggers write below `folder`, unless the environment says where."""
    os.environ.setdefault("TENSORBOARD_DIR", os.path.abspath(os.path.join(folder, "tensorboard")))
    os.environ.setdefault("WANDB_DIR", os.path.abspath(folder))


def use_new_file(folder: str) -> None:
    """Let all of them write below `folder`, the `file` logger to a new file at each start: it empties what is there.

    Unless the environment says where. The folder is made: verl's logger does not.
    """
    use_output_folder(folder)
    if "VERL_FILE_LOGGER_ROOT" not in os.environ:
        path = metrics_path(Path(folder) / f"metrics-{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
