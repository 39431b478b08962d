"""Learning-rate schedules by name: verl's own two, and those of transformers' `get_scheduler` that need steps only."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import FSDPOptimizerConfig

# Also with warm-up: verl's `constant` is transformers' `constant_with_warmup`, its `cosine` ends at min_lr_ratio.
OF_VERL = ("constant", "cosine")
WSD = "warmup_stable_decay"
OF_TRANSFORMERS = (
    "linear",
    "polynomial",
    "inverse_sqrt",
    WSD,
    "constant_with_warmup",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
)
WITHOUT_ARGUMENTS = (*OF_VERL, "constant_with_warmup")


def schedule(optimizer: torch.optim.Optimizer, optim: FSDPOptimizerConfig) -> LambdaLR:
    """The schedule that `optim` describes, for a run of `optim.total_training_steps` steps.

    Raises:
        ValueError: arguments in `lr_scheduler_kwargs` that the schedule does not take, lacks, or cannot work with.
    """
    warmup, steps = optim.lr_warmup_steps, optim.total_training_steps
    if warmup is None or warmup <= 0:
        warmup = int(optim.lr_warmup_steps_ratio * steps)
    name = optim.lr_scheduler_type
    if name == "constant":
        return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    if name == "cosine":
        return get_cosine_schedule_with_warmup(
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            min_lr_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
            zero_indexed_step=optim.zero_indexed_step,
        )
    arguments = dict(optim.lr_scheduler_kwargs or {})
    try:
        if name == WSD:
            arguments |= _phases(arguments, steps - warmup)
        made = get_scheduler(name, optimizer, warmup, None if name == WSD else steps, arguments)
        for step in (0, warmup, (warmup + steps) // 2, steps):
            _check_rate(made.lr_lambdas[0](step))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"optim.lr_scheduler_type={name} with optim.lr_scheduler_kwargs={optim.lr_scheduler_kwargs or {}}, "
            f"{warmup} steps of warm-up and {steps} in all: {error}"
        ) from error
    return made


def _phases(arguments: dict[str, Any], remaining: int) -> dict[str, int]:
    """Both phases of "warmup_stable_decay" from those given; without any a third is stable, as in LLaMA-Factory."""
    default = remaining - arguments["num_decay_steps"] if "num_decay_steps" in arguments else remaining // 3
    stable = arguments.get("num_stable_steps", default)
    decay = arguments.get("num_decay_steps", remaining - stable)
    if min(stable, decay) < 0 or stable + decay > remaining:
        raise ValueError(f"num_stable_steps={stable} and num_decay_steps={decay} are not parts of {remaining} steps")
    return {"num_stable_steps": stable, "num_decay_steps": decay}


def _check_rate(share: float) -> None:
    if not 0 <= share < float("inf"):
        raise ValueError(f"the learning rate would be {share} times optim.lr")
