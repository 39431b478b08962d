"""Imported by verl's workers (`actor_rollout_ref.model.external_lib`): the second weight transfer takes ten seconds.

A test that ends a process in the middle of a transfer would otherwise have to hit some milliseconds. The file that
SLOW_EXPORT_MARK names appears when the transfer has begun.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatrain_verl.verl_backend.engine import MegaTrainEngine

SECONDS = 10.0
export, calls = MegaTrainEngine._export, []


def slow(self: MegaTrainEngine) -> Iterator[tuple[str, Tensor]]:
    calls.append(self)
    for number, item in enumerate(export(self)):
        yield item
        if number == 0 and len(calls) == 2:
            Path(os.environ["SLOW_EXPORT_MARK"]).touch()
            time.sleep(SECONDS)


MegaTrainEngine._export = slow
