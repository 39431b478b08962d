"""Ends of a run before its last step: SIGTERM, and an evaluation loss that does not fall any more."""

import os
import shlex
import signal
from collections.abc import Mapping
from types import FrameType, TracebackType

from omegaconf import DictConfig

SIGTERM = "SIGTERM"
# What the run's command reads from the environment and a new shell may not have.
ENVIRONMENT = ("VERL_PLATFORM", "CUDA_VISIBLE_DEVICES")


class Stopped(Exception):
    """The run ends after the current step; says why."""


class Termination:
    """Inside the block the first SIGTERM is only noted; a second one ends the process as ever."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "Termination":
        self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGTERM, self._previous)
        # Not `print`: the signal may have come in the middle of one.
        os.write(2, b"\nSIGTERM: the run saves after this step and ends; a second SIGTERM ends it at once\n")


def resume_command(config: DictConfig, command: list[str], environment: Mapping[str, str]) -> str:
    """The shell command that goes on from the newest checkpoint of a run started by `command`."""
    trainer = config.trainer
    settings = [f"{name}={shlex.quote(environment[name])}" for name in ENVIRONMENT if name in environment]
    added = []
    if trainer.resume_mode != "auto":
        added.append("trainer.resume_mode=auto")
    if trainer.resume_from_path is not None:
        added.append("trainer.resume_from_path=null")
    return " ".join([*settings, shlex.join([*command, *added])])
