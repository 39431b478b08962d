"""What a run has reached so far: kept in each checkpoint, so that a resumed run goes on counting."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

NAME = "run_state.json"


@dataclass
class RunState:
    """Counts and results up to a step; `write` and `read` make it part of the checkpoints.

    Attributes:
        step: the last step whose update was started.
        tokens: of all rows of all steps.
        train_loss: of that step.
        val_loss: of the last evaluation, which was at `val_step`.
        best_loss: of all evaluations, at `best_step`.
        evaluations_since_best: how many have not been better since.
        steps_without_update: steps in a row, up to now, whose gradient was not finite.
    """

    step: int = 0
    tokens: int = 0
    train_loss: float | None = None
    val_loss: float | None = None
    val_step: int = 0
    best_loss: float | None = None
    best_step: int = 0
    evaluations_since_best: int = 0
    steps_without_update: int = 0

    def trained(self, step: int, tokens: int, loss: float, grad_norm: float) -> None:
        """Count a training step of `tokens`."""
        self.step, self.tokens, self.train_loss = step, self.tokens + tokens, loss
        self.steps_without_update = 0 if math.isfinite(grad_norm) else self.steps_without_update + 1

    def evaluated(self, loss: float) -> None:
        """Count an evaluation after the current step; one that is not finite is never the best."""
        self.val_loss, self.val_step = loss, self.step
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.evaluations_since_best = loss, self.step, 0
        else:
            self.evaluations_since_best += 1

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint."""
        (folder / NAME).write_text(json.dumps(dataclasses.asdict(self), indent=1))

    def read(self, folder: Path) -> None:
        """Become what `write` wrote.

        Raises:
            ValueError: the checkpoint has no such file, or a damaged one.
        """
        path = folder / NAME
        try:
            saved = RunState(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not what an SFT run wrote: {error}; resume from another checkpoint") from error
        vars(self).update(vars(saved))


def perplexity(loss: float) -> float:
    """exp(`loss`), infinite where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
