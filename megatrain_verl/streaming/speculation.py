"""AdamW that starts before the gradient norm is known, on the guess that nothing will be clipped.

The results go to spare arenas. If the guess was right they become the unit's state by a swap of pointers, and its old
arenas the spare ones; if not they are dropped, and the state is bit for bit what it was. Units whose turn has not come
when the norm is known are left to the ordinary update: the next forward pass begins with other units than these.

Several ranks offer the same units in the same order, but do not get equally far. They agree on the one that got
farthest: up to there the others go on ahead too, so that a unit is swapped by all ranks or by none.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from megatrain_verl.streaming.group.group import Group
from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep

EVERYTHING = 1 << 30


class Guess:
    """A step that is probably the next one, and the `units` that may be updated for it ahead, in their order."""

    def __init__(self, step: AdamWStep) -> None:
        self.step, self.units = step, list[UnitState]()
        self._begun = 0
        self._limit: int | None = EVERYTHING  # so many units are updated; None while the ranks agree on it
        self._changed = threading.Condition()

    def begin(self, position: int) -> bool:
        """Whether the update of the unit at `position`, whose turn has come, is to be done."""
        with self._changed:
            self._changed.wait_for(lambda: self._limit is not None)
            if position >= self._limit:
                return False
            self._begun = position + 1
            return True

    def close(self, limit: int | None = 0) -> int:
        """Begin no unit from `limit` on; None lets each wait for the next call. Returns how many have begun."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()
            return self._begun

    def agree(self, group: Group) -> list[UnitState]:
        """Close it; returns the units that every rank has updated, or will before its other units."""
        agreed = 0
        try:
            begun = self.close(None)
            agreed = int(max(count for (count,) in group.gather([begun], "how many units are updated ahead")))
        finally:
            self.close(agreed)
        return self.units[:agreed]


class Speculation:
    """Updates units ahead, for one guessed step at a time. Every rank of `group` has the same guesses."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._guess: Guess | None = None
        self._clips = False  # the last step was clipped: the next one probably is, too

    @property
    def step(self) -> AdamWStep | None:
        """The guessed step; None while nothing is guessed."""
        return None if self._guess is None else self._guess.step

    def start(self, step: AdamWStep | None) -> None:
        """Drop what was updated ahead; from now on update for `step`, unless it will probably be clipped."""
        if self._guess is not None:
            self._guess.close()
        self._guess = None if step is None or self._clips else Guess(step)

    def update_of(self, unit: UnitState, adamw: HostAdamW) -> Callable[[], None] | None:
        """The work of updating `unit` into its spare arenas; None if it has none or nothing is to be done ahead."""
        guess = self._guess
        if guess is None or unit.spare is None:
            return None
        # As they are now: `take` swaps the arenas, perhaps while this work runs.
        source, target, position = replace(unit), replace(unit.spare), len(guess.units)
        guess.units.append(unit)

        def update() -> None:
            if guess.begin(position):
                adamw.update(source, guess.step, into=target)

        return update

    def take(self, step: AdamWStep) -> set[str]:
        """Names of the units that are updated to `step` ahead; that becomes their state. The others' will not begin.

        With several ranks the update of some of them is still to come: wait for it as for any other.
        """
        guess, self._guess = self._guess, None
        self._clips = step.grad_scale != 1.0
        if guess is None or not guess.units:
            return set()
        if guess.step != step:
            guess.close()
            return set()
        taken = guess.agree(self._group)
        for unit in taken:
            unit.take_spare()
            unit.reference_filled = unit.reference is not None  # the update copies it before it writes
        return {unit.plan.name for unit in taken}
