"""Learning-rate schedules of transformers behind verl's options: values by step, saved states, and what is refused."""

import json
import re
from typing import Any

import pytest

from megatrain_verl.verl_backend.optimizer import LearningRate, MegaTrainOptimizerConfig


def schedule(name: str, steps: int, warmup: int = 2, **arguments: Any) -> LearningRate:
    optim = MegaTrainOptimizerConfig(
        lr=1.0,
        lr_scheduler_type=name,
        lr_warmup_steps=warmup,
        total_training_steps=steps,
        lr_scheduler_kwargs=arguments or None,
    )
    return LearningRate(optim)


RATES = {
    "linear": ({}, [0, 0.5, 1, 0.75, 0.5, 0.25, 0]),
    "polynomial": ({"power": 2, "lr_end": 0.2}, [0, 0.5, 1, 0.65, 0.4, 0.25, 0.2]),
    "inverse_sqrt": ({"timescale": 2}, [0, 0.5, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5, (1 / 3) ** 0.5]),
    "constant_with_warmup": ({}, [0, 0.5, 1, 1, 1, 1, 1]),
    "cosine_with_restarts": ({"num_cycles": 2}, [0, 0.5, 1, 0.5, 1, 0.5, 0]),
    "cosine_with_min_lr": ({"min_lr": 0.1}, [0, 0.5, 1, 0.8682, 0.55, 0.2318, 0.1]),
    # transformers counts the steps of this one from 1, so that it turns up again at the end.
    "cosine_warmup_with_min_lr": ({"min_lr_rate": 0.1}, [0.5, 1, 0.8682, 0.55, 0.2318, 0.1, 0.2318]),
    "warmup_stable_decay": ({"num_decay_steps": 2, "min_lr_ratio": 0.1}, [0.1, 0.55, 1, 1, 1, 0.55, 0.1]),
}


@pytest.mark.parametrize(("name", "arguments", "expected"), [(name, *rates) for name, rates in RATES.items()])
def test_rates_by_step_also_after_a_saved_state(name: str, arguments: dict[str, Any], expected: list[float]) -> None:
    learning_rate = schedule(name, 6, **arguments)
    assert [learning_rate.value] + [learning_rate.step() for _ in range(3)] == pytest.approx(expected[:4], abs=5e-5)
    resumed = schedule(name, 6, **arguments)
    resumed.load_state_dict(json.loads(json.dumps(learning_rate.state_dict())))
    assert [resumed.value] + [resumed.step() for _ in range(3)] == pytest.approx(expected[3:], abs=5e-5)


@pytest.mark.parametrize(
    ("arguments", "stable"), [({}, 3), ({"num_stable_steps": 5}, 5), ({"num_decay_steps": 2}, 7)], ids=str
)
def test_what_is_left_open_of_stable_and_decay_follows(arguments: dict[str, int], stable: int) -> None:
    learning_rate = schedule("warmup_stable_decay", 10, 1, **arguments)
    rates = [learning_rate.step() for _ in range(10)]
    assert rates[: stable + 1] == [1.0] * (stable + 1)
    assert rates[stable + 1 :] == sorted(rates[stable + 1 :], reverse=True) and 1 > rates[stable + 1] > rates[-1] == 0


WRONG = {
    "unknown argument": ("linear", {"power": 2}, "lr_scheduler_type=linear with .*unexpected keyword argument 'power'"),
    "missing argument": ("cosine_with_min_lr", {}, "min_lr"),
    "end above the start": ("polynomial", {"lr_end": 2.0}, "lr_end"),
    "text for a number": ("polynomial", {"power": "two"}, "lr_scheduler_kwargs={'power': 'two'}"),
    "negative rate": ("warmup_stable_decay", {"min_lr_ratio": -0.5}, "the learning rate would be -0.5 times optim.lr"),
    "too long a decay": ("warmup_stable_decay", {"num_decay_steps": 5}, "num_decay_steps=5 are not parts of 4 steps"),
}


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_arguments_that_cannot_work_are_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(name, 6, **arguments)


def test_an_unknown_schedule_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=re.escape("must be one of constant, cosine, linear") + ".*got 'linaer'"):
        MegaTrainOptimizerConfig(lr_scheduler_type="linaer")
    with pytest.raises(ValueError, match="min_lr_ratio belongs to cosine; linear takes"):
        MegaTrainOptimizerConfig(lr_scheduler_type="linear", min_lr_ratio=0.1)


@pytest.mark.parametrize("name", ["constant", "cosine", "constant_with_warmup"])
def test_arguments_that_a_schedule_would_ignore_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"lr_scheduler_type={name} takes no optim.lr_scheduler_kwargs"):
        MegaTrainOptimizerConfig(lr_scheduler_type=name, lr_scheduler_kwargs={"min_lr_rate": 0.1})
