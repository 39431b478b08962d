"""What the values of an SFT run's options may be, for errors that name the option."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from verl.utils.tracking import Tracking

from megatrain_verl.sft import mixture
from megatrain_verl.verl_backend import schedules


@dataclass(frozen=True)
class Rule:
    """`accepts` a value that is `described` so."""

    described: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> "Rule":
        """The same, and null."""
        return Rule(f"{self.described} or null", lambda value: value is None or self.accepts(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(least: int) -> Rule:
    """A whole number."""
    return Rule(f"a whole number, at least {least}", lambda value: _is_whole(value) and value >= least)


def number(least: float, below: float = math.inf) -> Rule:
    """A number in a range."""
    bound = "" if below == math.inf else f" and below {below:g}"
    return Rule(f"a number, at least {least:g}{bound}", lambda value: _is_number(value) and least <= value < below)


def one_of(*choices: str) -> Rule:
    """One of these words."""
    return Rule(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


BOOL = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("text", lambda value: isinstance(value, str) and bool(value) and "\0" not in value)
POSITIVE = Rule("a positive number", lambda value: _is_number(value) and value > 0)
MAPPING = Rule("a mapping", lambda value: isinstance(value, DictConfig))
EVERY = Rule(
    "a number of steps (-1: never) or after_each_epoch",
    lambda value: _is_whole(value) and (value == -1 or value > 0) or value == "after_each_epoch",
)
LOGGERS = Rule(
    f"a list of {', '.join(Tracking.supported_backend)}",
    lambda value: isinstance(value, ListConfig) and all(name in Tracking.supported_backend for name in value),
)
BETAS = Rule(
    "two numbers in [0, 1)",
    lambda value: (
        isinstance(value, ListConfig) and len(value) == 2 and all(_is_number(b) and 0 <= b < 1 for b in value)
    ),
)

WEIGHTS = Rule(
    "a list of positive numbers",
    lambda value: isinstance(value, ListConfig) and len(value) > 0 and all(POSITIVE.accepts(item) for item in value),
)
DEVICES = Rule(
    "a list of different whole numbers",
    lambda value: (
        isinstance(value, ListConfig)
        and all(_is_whole(item) and item >= 0 for item in value)
        and len(set(value)) == len(value) > 0
    ),
)
DATASETS = Rule(
    "names of data sets, a description of one, or a list of these",
    lambda value: all(
        TEXT.accepts(item) or MAPPING.accepts(item)
        for item in (value if isinstance(value, ListConfig) and value else [value])
    ),
)

RULES = {
    "model.path": Rule("the folder of a model", TEXT.accepts),
    "data.dataset": DATASETS.or_null(),
    "data.val_dataset": DATASETS.or_null(),
    "data.mix_strategy": one_of(*mixture.STRATEGIES),
    "data.interleave_probs": WEIGHTS.or_null(),
    "data.dataset_dir": TEXT,
    "data.max_samples": whole(1).or_null(),
    "data.val_size": number(0),
    "data.system_prompt": Rule("text", lambda value: isinstance(value, str)).or_null(),
    "data.train_on_prompt": BOOL,
    "data.apply_chat_template_kwargs": MAPPING,
    "data.train_batch_size": whole(1),
    "data.micro_batch_size_per_gpu": whole(1),
    "data.max_length": whole(1),
    "data.truncation": one_of("drop", "error", "right"),
    "data.packing": BOOL,
    "data.use_dynamic_bsz": BOOL,
    "data.max_token_len_per_gpu": whole(1),
    "data.num_workers": whole(0),
    "optim.lr": number(0),
    "optim.lr_scheduler_type": one_of(*schedules.OF_VERL, *schedules.OF_TRANSFORMERS),
    "optim.lr_scheduler_kwargs": MAPPING.or_null(),
    "optim.lr_warmup_steps": whole(-1).or_null(),
    "optim.lr_warmup_steps_ratio": number(0, below=1),
    "optim.min_lr_ratio": number(0).or_null(),
    "optim.num_cycles": number(0),
    "optim.weight_decay": number(0),
    "optim.betas": BETAS,
    "optim.clip_grad": POSITIVE.or_null(),
    "optim.override_optimizer_config": MAPPING.or_null(),
    "trainer.project_name": TEXT,
    "trainer.experiment_name": TEXT,
    "trainer.default_local_dir": TEXT,
    "trainer.logger": LOGGERS,
    "trainer.seed": whole(0),
    "trainer.devices": DEVICES.or_null(),
    "trainer.n_gpus_per_node": whole(1),
    "trainer.total_epochs": whole(1),
    "trainer.total_training_steps": whole(1).or_null(),
    "trainer.save_freq": EVERY,
    "trainer.test_freq": EVERY,
    "trainer.max_ckpt_to_keep": whole(0).or_null(),
    "trainer.resume_mode": one_of("auto", "disable", "resume_path"),
    "trainer.resume_from_path": TEXT.or_null(),
    "trainer.sample_rows": whole(0),
    "trainer.sample_tokens": whole(1),
    "trainer.early_stop_patience": whole(1).or_null(),
}


def check(config: DictConfig) -> None:
    """Compare the options of `config`, a whole run, with `RULES`.

    Raises:
        ValueError: names the option, what it may be, and what it is.
    """
    for option, rule in RULES.items():
        try:
            value = OmegaConf.select(config, option, throw_on_missing=True)
        except OmegaConfBaseException as error:  # ???, or an interpolation that leads nowhere
            raise ValueError(f"{option} must be {rule.described}: {str(error).splitlines()[0]}") from error
        if not rule.accepts(value):
            raise ValueError(f"{option} must be {rule.described}, got {value!r}")
