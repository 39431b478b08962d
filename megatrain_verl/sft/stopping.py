"""Ends of a run before its last step: SIGTERM, Ctrl-C (SIGINT), and an evaluation loss that does not fall any more."""

import os
import shlex
import signal
from collections.abc import Mapping
from types import FrameType, TracebackType

from omegaconf import DictConfig

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# What the run's command reads from the environment and a new shell may not have.
ENVIRONMENT = ("VERL_PLATFORM", "CUDA_VISIBLE_DEVICES")


class Stopped(Exception):
    """The run ends after the current step; says why."""


class Termination:
    """Inside the block the first of `SIGNALS` is only noted; a second one ends the process as ever.

    `requested` is its name.
    """

    def __init__(self) -> None:
        self.requested: str | None = None

    def __enter__(self) -> "Termination":
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        self._restore()
        # Not `print`: the signal may have come in the middle of one.
        text = f"\n{self.requested}: the run saves after this step and ends; a second signal ends it at once\n"
        os.write(2, text.encode())


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
