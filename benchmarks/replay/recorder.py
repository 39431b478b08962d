"""Records what verl's trainer sends to the actor's update.

With `actor_rollout_ref.model.external_lib=benchmarks.replay.recorder` verl imports this module in each worker before it
builds the actor's `TrainingWorker`. Importing it puts a worker in its place that writes every batch to the folder
REPLAY_FOLDER, and once the options of loss and optimizer, and trains on it.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from verl.workers import engine_workers
from verl.workers.config import ActorConfig

from benchmarks.replay import batches

OPTIONS_FILE = "options.json"
LOSS_OPTIONS = (
    "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "entropy_coeff",
    "use_kl_loss", "kl_loss_coef", "kl_loss_type", "ppo_micro_batch_size_per_gpu", "rollout_n",
)  # fmt: skip


def options(actor: ActorConfig) -> dict[str, dict[str, Any]]:
    """What a replay needs of the actor's options to compute the same loss and the same optimizer step."""
    optim = dataclasses.asdict(actor.optim)
    return {
        "loss": {name: getattr(actor, name) for name in LOSS_OPTIONS},
        "optim": {name: value for name, value in optim.items() if not name.startswith("_")},
    }


class RecordingWorker(engine_workers.TrainingWorker):
    """verl's worker; saves the batches of `train_mini_batch` as `batch_0001.safetensors` and so on."""

    folder: Path
    steps = 0

    def set_loss_fn(self, loss_fn: Callable[..., Any]) -> None:
        super().set_loss_fn(loss_fn)
        self.folder = Path(os.environ["REPLAY_FOLDER"])
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / OPTIONS_FILE).write_text(json.dumps(options(loss_fn.keywords["config"]), indent=1))

    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        self.steps += 1
        batches.save(data, self.folder / f"batch_{self.steps:04}.safetensors")
        return super().train_mini_batch(data)


engine_workers.ActorRolloutRefWorker.actor_worker_cls = RecordingWorker
