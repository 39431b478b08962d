"""What is said of a run while it goes: the progress bar, rates of each step, and results of each evaluation."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensordict import TensorDict
from tqdm import tqdm
from verl.utils import tensordict_utils as tu
from verl.utils.tracking import Tracking
from verl.workers.engine_workers import TrainingWorker

from megatrain_verl.sft.run_state import RunState, perplexity
from megatrain_verl.verl_backend import ranks

FLOPS_PER_PARAMETER = 6  # of forward and backward per token, recomputation not counted


class RunTracking(Tracking):
    """verl's trackers, with what `complete` adds to each entry; after an entry is logged, `logged` is called."""

    def __init__(
        self, complete: Callable[[dict[str, Any]], None], logged: Callable[[dict[str, Any], int], None], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._complete, self._logged = complete, logged

    def log(self, data: dict[str, Any], step: int, backend: str | None = None) -> None:
        """Complete `data` and pass it to every tracker."""
        self._complete(data, step)
        super().log(data, step, backend)
        self._logged(data, step)


class EvaluatingWorker:
    """verl's TrainingWorker; the mean loss of an evaluation is that of its tokens, however they lie in batches.

    verl's own `val/loss` is the mean over batches, in which a token of a batch with few counts for more.
    """

    def __init__(self, worker: TrainingWorker) -> None:
        self._worker = worker
        self._loss_sum, self._tokens = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """Score a batch of an evaluation, and count it."""
        tokens = ranks.total(int(data["loss_mask"].sum()))  # the loss is the mean over the ranks
        output = self._worker.infer_batch(data)
        self._loss_sum += tu.get(output, "metrics")["loss"] * tokens
        self._tokens += tokens
        return output

    def take_mean_loss(self) -> float:
        """The mean over all tokens since the last call; not a number without any."""
        mean = self._loss_sum / self._tokens if self._tokens else math.nan
        self._loss_sum, self._tokens = 0.0, 0
        return mean


class Progress:
    """Takes the place of verl's progress bar, and knows how long a step took.

    Args:
        state: counts the steps.
        parameters: that a token passes, for TFLOP/s (6 x parameters x tokens / seconds).
        total_steps: of the run.
        step_ended: called when all of a step is done: update started, evaluated and saved if it was its turn.
    """

    def __init__(self, state: RunState, parameters: int, total_steps: int, step_ended: Callable[[], None]) -> None:
        self._state, self._parameters, self._total_steps = state, parameters, total_steps
        self._step_ended = step_ended
        self._bar: tqdm | None = None
        self._started = 0.0
        self.seconds = 0.0  # of all steps of this process, with their data, without evaluation and saving
        # Where the data loader stood before the batch that is being trained on; None between two.
        self.position: dict[str, Any] | None = None

    def batches(self, loader: Iterable[Any], *, desc: str, disable: bool, **_: Any) -> Iterator[Any]:
        """The batches of an epoch behind a bar that counts the steps of the run; called as `tqdm` is."""
        with tqdm(
            total=self._total_steps, initial=self._state.step, desc=desc, disable=disable, unit="step"
        ) as self._bar:
            iterator = iter(loader)
            while True:
                self._started = time.perf_counter()
                self.position = loader.state_dict()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                yield batch
                self._step_ended()

    def trained(self, metrics: dict[str, Any], step: int) -> None:
        """Add the rates of the step that has just been trained to its metrics, and show it."""
        seconds = time.perf_counter() - self._started
        self.seconds += seconds
        tokens, loss = metrics["train/global_tokens"], metrics["train/loss"]
        self._state.trained(step, tokens, loss, metrics["train/grad_norm"])
        self.position = None
        per_second = tokens / seconds
        tflops = FLOPS_PER_PARAMETER * self._parameters * per_second / 1e12
        metrics["train/total_tokens(B)"] = self._state.tokens / 1e9
        metrics["train/tokens_per_second"], metrics["train/tflops"] = per_second, tflops
        self._bar.set_postfix_str(
            f"loss {loss:.4f}, lr {metrics['train/lr']:.2e}, {per_second:,.0f} tokens/s, {tflops:.3g} TFLOP/s",
            refresh=False,
        )
        self._bar.update()


def evaluated(metrics: dict[str, Any], state: RunState, loss: float) -> None:
    """Put the mean `loss` of an evaluation and its perplexity into its metrics."""
    state.evaluated(loss)
    metrics["val/loss"], metrics["val/perplexity"] = loss, perplexity(loss)
