"""The hyper-parameters of one optimizer step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamWStep:
    """The hyper-parameters of one optimizer step, frozen when it starts: its units are updated later, one by one."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    # 1 for the first update.
    step: int
    # Factor on every gradient: clipping, and the loss scaling if there is any.
    grad_scale: float
    # False leaves one-dimensional parameters (norms, biases) without decay.
    decay_norms_and_biases: bool
