"""verl's optimizer options as the streaming engine's AdamW and a learning-rate schedule that equals verl's."""

from typing import Any

import torch
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import FSDPOptimizerConfig, OptimizerConfig

from megatrain_verl.config import AdamWConfig
from megatrain_verl.verl_backend.options import unknown_option

# What verl's group `optim: fsdp` has no field for; verl passes such options to torch.optim.AdamW as they are.
OVERRIDES = ("betas", "decay_norms_and_biases", "eps", "weight_decay")


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
    """The learning rate of the step to come, by the very scheduler functions of verl's FSDP engine.

    The schedulers are torch's and want an optimizer; the one they get holds a single number and updates nothing.
    """

    def __init__(self, optim: FSDPOptimizerConfig) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=optim.lr)
        self._scheduler = _schedule(self._optimizer, optim)

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


def _schedule(optimizer: torch.optim.Optimizer, optim: FSDPOptimizerConfig) -> torch.optim.lr_scheduler.LambdaLR:
    warmup = optim.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * optim.total_training_steps)
    if optim.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    return get_cosine_schedule_with_warmup(
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=optim.total_training_steps,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        zero_indexed_step=optim.zero_indexed_step,
    )
