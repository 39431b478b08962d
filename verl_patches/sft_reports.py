"""verl 0.9.1: the SFT trainer's progress bar, trackers and time of the steps, replaced while one run trains.

Reason: `SFTTrainer.fit` makes both from names of its module and keeps them in local variables. Without them nothing can
be added to what is logged (tokens per second, perplexity), and there is no place that is reached once after each step,
with its evaluation and save done, which is where a run can be ended and resumed from. At the end it prints a time of
the training steps that it never counts: always 0.00 s.

Patched: the names `Tracking`, `tqdm` and `print` in `verl.trainer.sft_trainer`, inside the block only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl_patches.guard import check_source

SOURCES = {"fit": "80026156bf625f4d"}
TIME = "Total time for train steps: "


@contextmanager
def replaced(
    *, tracking: Callable[..., Any], progress: Callable[..., Any], seconds: Callable[[], float]
) -> Iterator[None]:
    """Inside, verl's SFT trainer calls `tracking` for its trackers, `progress` for its bar and `seconds` for its time.

    Raises:
        RuntimeError: verl's loop is not the one this was written for.
    """
    from verl.trainer import sft_trainer

    check_source("sft_reports", sft_trainer.SFTTrainer, SOURCES)
    before = sft_trainer.Tracking, sft_trainer.tqdm

    def report(line: str) -> None:
        print(f"{TIME}{seconds():.2f}s" if line.startswith(TIME) else line)

    sft_trainer.Tracking, sft_trainer.tqdm, sft_trainer.print = tracking, progress, report
    try:
        yield
    finally:
        sft_trainer.Tracking, sft_trainer.tqdm = before
        del sft_trainer.print  # the built-in again
