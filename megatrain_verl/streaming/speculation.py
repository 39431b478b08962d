"""AdamW that starts before the gradient norm is known, on the guess that nothing will be clipped.

The results go to spare arenas. If the guess was right they become the unit's state by a swap of pointers, and its old
arenas the spare ones; if not they are dropped, and the state is bit for bit what it was. Units whose turn has not come
when the norm is known are left to the ordinary update: the next forward pass begins with other units than these.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep


class Speculation:
    """The units that have been updated ahead for the step `step`, which is None while nothing is guessed."""

    def __init__(self) -> None:
        self.step: AdamWStep | None = None
        self._begun: list[UnitState] = []
        self._lock = threading.Lock()
        self._clips = False  # the last step was clipped: the next one probably is, too

    def start(self, step: AdamWStep | None) -> None:
        """Drop what was updated ahead; from now on update for `step`, unless it will probably be clipped."""
        with self._lock:
            self.step = None if self._clips else step
            self._begun = []

    def update_of(self, unit: UnitState, adamw: HostAdamW) -> Callable[[], None] | None:
        """The work of updating `unit` into its spare arenas; None if it has none or nothing is to be done ahead."""
        if self.step is None or unit.spare is None:
            return None
        # As they are now: `take` swaps the arenas, perhaps while this work runs.
        source, target, step, begun = replace(unit), replace(unit.spare), self.step, self._begun

        def update() -> None:
            with self._lock:
                if self._begun is not begun:
                    return
                begun.append(unit)
            adamw.update(source, step, into=target)

        return update

    def take(self, step: AdamWStep) -> set[str]:
        """Names of the units whose update to `step` has begun; it becomes their state. The others' will not begin."""
        with self._lock:
            guessed_right, begun = step == self.step, self._begun
            self.step, self._begun = None, []
        self._clips = step.grad_scale != 1.0
        if not guessed_right:
            return set()
        for unit in begun:
            unit.take_spare()
            unit.reference_filled = unit.reference is not None  # the update copies it before it writes
        return {unit.plan.name for unit in begun}
