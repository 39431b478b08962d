"""AdamW that starts before the gradient norm is known, on the guess that nothing will be clipped.

The results go to spare arenas. If the guess was right they become the unit's state by a swap of pointers, and its old
arenas the spare ones; if not they are dropped, and the state is bit for bit what it was.
"""

from collections.abc import Callable
from dataclasses import replace

from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep


class Speculation:
    """The units that were updated ahead of the step `step`; None where nothing is."""

    def __init__(self) -> None:
        self.step: AdamWStep | None = None
        self._units: dict[str, UnitState] = {}
        self._clips = False  # the last step was clipped: the next one probably is, too

    def start(self, step: AdamWStep | None) -> None:
        """Drop what was updated ahead; from now on update for `step`, unless it will probably be clipped."""
        self.step = None if self._clips else step
        self._units.clear()

    def update_of(self, unit: UnitState, adamw: HostAdamW) -> Callable[[], None] | None:
        """The work of updating `unit` into its spare arenas; None if it has none or nothing is to be done ahead."""
        if self.step is None or unit.spare is None:
            return None
        self._units[unit.plan.name] = unit
        # As they are now: `take` swaps the arenas, perhaps before this work runs.
        source, target, step = replace(unit), replace(unit.spare), self.step

        def update() -> None:
            adamw.update(source, step, into=target)
            unit.reference_filled = source.reference_filled

        return update

    def take(self, step: AdamWStep) -> set[str]:
        """Names of the units whose update to `step` has been started; it becomes their state."""
        self._clips = step.grad_scale != 1.0
        if step != self.step:
            return set()
        for unit in self._units.values():
            unit.take_spare()
        return set(self._units)
