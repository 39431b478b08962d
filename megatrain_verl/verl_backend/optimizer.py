"""verl's optimizer options as the streaming engine's AdamW and a learning-rate schedule."""

from dataclasses import dataclass
from typing import Any

import torch
from verl.workers.config import FSDPOptimizerConfig, OptimizerConfig

from megatrain_verl.config import AdamWConfig
from megatrain_verl.verl_backend import schedules
from megatrain_verl.verl_backend.options import unknown_option

# What verl's group `optim: fsdp` has no field for; verl passes such options to torch.optim.AdamW as they are.
OVERRIDES = ("betas", "decay_norms_and_biases", "eps", "weight_decay")


@dataclass
class MegaTrainOptimizerConfig(FSDPOptimizerConfig):
    """verl's options of AdamW, with the schedules of `schedules.OF_TRANSFORMERS` as well.

    Raises:
        ValueError: no such schedule, or one that takes no min_lr_ratio or no lr_scheduler_kwargs.
    """

    # Arguments of a schedule of transformers, such as {power: 2, lr_end: 1e-7} of "polynomial".
    lr_scheduler_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        known = (*schedules.OF_VERL, *schedules.OF_TRANSFORMERS)
        if self.lr_scheduler_type not in known:
            raise ValueError(
                f"optim.lr_scheduler_type must be one of {', '.join(known)}, got {self.lr_scheduler_type!r}"
            )
        if self.lr_scheduler_kwargs and self.lr_scheduler_type in schedules.WITHOUT_ARGUMENTS:
            raise ValueError(
                f"optim.lr_scheduler_type={self.lr_scheduler_type} takes no optim.lr_scheduler_kwargs: leave them out, "
                "or name another schedule (verl's cosine ends at optim.min_lr_ratio)"
            )
        if self.lr_scheduler_type in schedules.OF_VERL:
            super().__post_init__()  # knows no others
            return
        OptimizerConfig.__post_init__(self)
        if self.min_lr_ratio:
            raise ValueError(
                f"optim.min_lr_ratio belongs to cosine; {self.lr_scheduler_type} takes its arguments from "
                "optim.lr_scheduler_kwargs"
            )


def adamw_config(optim: OptimizerConfig) -> AdamWConfig:
    """The host AdamW for verl's `optim` options.

    Raises:
        ValueError: another optimizer than AdamW, options of another backend's group, or an unknown override.
    """
    if not isinstance(optim, FSDPOptimizerConfig):
        raise ValueError(f"megatrain takes the options of verl's group optim=fsdp, got {type(optim).__name__}")
    if (optim.optimizer, optim.optimizer_impl) != ("AdamW", "torch.optim"):
        raise ValueError(
            f"optimizer {optim.optimizer} of {optim.optimizer_impl} is not supported: the host optimizer is AdamW; "
            "set optim.optimizer=AdamW and optim.optimizer_impl=torch.optim"
        )
    overrides = dict(optim.override_optimizer_config or {})
    for name in overrides:
        if name not in OVERRIDES:
            raise unknown_option(name, OVERRIDES, "optim.override_optimizer_config")
    settings = {"betas": optim.betas, "weight_decay": optim.weight_decay, **overrides}
    return AdamWConfig(lr=optim.lr, clip_grad=optim.clip_grad, **settings)


class LearningRate:
    """The learning rate of the step to come, by the scheduler functions of verl's FSDP engine or of transformers.

    The schedulers are torch's and want an optimizer; the one they get holds a single number and updates nothing.
    """

    def __init__(self, optim: FSDPOptimizerConfig) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=optim.lr)
        self._scheduler = schedules.schedule(self._optimizer, optim)

    @property
    def value(self) -> float:
        """The learning rate of the next optimizer step."""
        return self._scheduler.get_last_lr()[0]

    def step(self) -> float:
        """Go on by one step; returns the new rate."""
        self._optimizer.step()  # torch warns about a scheduler that steps before its optimizer
        self._scheduler.step()
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, of numbers, lists and None only."""
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._scheduler.load_state_dict(state)
