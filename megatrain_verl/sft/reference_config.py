"""Configuration files of the MegaTrain reference implementation, as Hydra overrides of this package.

Such a file has the sections model, dataset, training, optimizer, memory and logging. What it leaves out has the
reference's default: 96 rows and 1024 tokens, 100 steps, a constant learning rate of 1e-5.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from megatrain_verl.sft.known import check_known

FLAG = "--config"
KEYS: dict[str, dict[str, type]] = {
    "model": {
        "name": str,
        "dtype": str,
        "device": int,
        "devices": list,
        "attn_implementation": str,
        "trust_remote_code": bool,
    },
    "dataset": {
        "name": str,
        "dataset_dir": str,
        "path": str,
        "query_field": str,
        "response_field": str,
        "max_seq_len": int,
        "num_workers": int,
        "system_prompt": str,
        "train_on_prompt": bool,
    },
    "training": {
        "batch_size": int,
        "gradient_accumulation_steps": int,
        "num_steps": int,
        "learning_rate": float,
        "weight_decay": float,
        "max_grad_norm": float,
        "seed": int,
    },
    "optimizer": {"type": str, "beta1": float, "beta2": float, "eps": float},
    "memory": {"checkpoint_interval": int, "num_grad_slabs": int},
    "logging": {"log_interval": int, "enable_timing": bool},
}
DEFAULTS = {
    "model.dtype": "bfloat16",
    "model.attn_implementation": "flash_attention_2",
    # The reference trusts by default; a file that does not say so runs nobody's code here.
    "model.trust_remote_code": False,
    "dataset.max_seq_len": 1024,
    "dataset.query_field": "query",
    "dataset.response_field": "response",
    "training.batch_size": 96,
    "training.gradient_accumulation_steps": 1,
    "training.num_steps": 100,
    "training.learning_rate": 1e-5,
    "training.weight_decay": 0.01,
    "training.max_grad_norm": 1.0,
    "training.seed": 42,
    "optimizer.type": "deepspeed_adam",
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
}
RENAMED = {
    "model.name": "model.path",
    "model.trust_remote_code": "model.trust_remote_code",
    "model.dtype": "engine.dtype",
    "dataset.dataset_dir": "data.dataset_dir",
    "dataset.max_seq_len": "data.max_length",
    "dataset.system_prompt": "data.system_prompt",
    "dataset.train_on_prompt": "data.train_on_prompt",
    "training.learning_rate": "optim.lr",
    "training.weight_decay": "optim.weight_decay",
    "training.max_grad_norm": "optim.clip_grad",
    "training.seed": "trainer.seed",
    "memory.checkpoint_interval": "engine.checkpoint_interval",
    "memory.num_grad_slabs": "engine.num_grad_slabs",
}
CHOICES = {
    "model.dtype": ("bfloat16", "float32"),
    # The reference's kernels compute the same; which one is used here, the engine chooses.
    "model.attn_implementation": ("flash_attention_2", "sdpa", "eager"),
    "optimizer.type": ("deepspeed_adam", "adamw"),
}
MICRO_BATCH_TOKENS = 8192
INTERPOLATION = re.compile(r"(\\*)\$\{")


def expand(arguments: list[str]) -> list[str]:
    """`arguments` of the command line with `--config FILE` replaced by FILE's overrides, which later ones override.

    Raises:
        ValueError: no such file, or what `overrides` raises.
    """
    expanded: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, file = argument.partition("=")
        if flag == FLAG:
            file = file if equals else next(rest, "")
            expanded += overrides(Path(file))
        else:
            expanded.append(argument)
    return expanded


def overrides(file: Path) -> list[str]:
    """The Hydra overrides that make a run of this package do what `file` says.

    Raises:
        ValueError: names the file and the key that is unknown (with the nearest known one), missing or wrong.
    """
    settings = DEFAULTS | _read(file)
    for key, choices in CHOICES.items():
        if settings[key] not in choices:
            raise ValueError(f"{file}: {key} must be one of {', '.join(choices)}, got {settings[key]!r}")
    if "model.name" not in settings:
        raise ValueError(f"{file}: model.name is missing")
    translated = {name: settings[key] for key, name in RENAMED.items() if key in settings}
    translated |= _data(settings, file) | _schedule(settings, file) | _devices(settings)
    translated |= {
        "optim.betas": [settings["optimizer.beta1"], settings["optimizer.beta2"]],
        "optim.override_optimizer_config": {"eps": settings["optimizer.eps"]},
        "trainer.experiment_name": file.stem,
        "trainer.default_local_dir": f"outputs/sft/{file.stem}",
    }
    return [f"{name}={_quoted(value)}" for name, value in translated.items()]


def _read(file: Path) -> dict[str, Any]:
    """The file's settings by "section.key"."""
    try:
        sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{FLAG} {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(sections, dict):
        raise ValueError(f"{file} must have the sections {', '.join(KEYS)}")
    settings = {}
    for section, values in sections.items():
        if section == "vlm":
            raise ValueError(f"{file}: section vlm is not translated; leave it out and set engine.freeze")
        check_known(section, KEYS, f"section of {file}")
        if not isinstance(values or {}, dict):
            raise ValueError(f"{file}: section {section} must map keys to values, got {values!r}")
        for key, value in (values or {}).items():
            check_known(key, KEYS[section], f"key of section {section} of {file}")
            if value is not None:
                settings[f"{section}.{key}"] = _typed(value, KEYS[section][key], f"{file}: {section}.{key}")
    return settings


def _typed(value: Any, kind: type, where: str) -> Any:
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 1e-5, without a point, for text
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    raise ValueError(f"{where} must be {names[kind]}, got {value!r}")


def _data(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    name, path, longest = settings.get("dataset.name"), settings.get("dataset.path"), settings["dataset.max_seq_len"]
    if not name and not path:
        raise ValueError(f"{file}: dataset.name or dataset.path is missing")
    columns = {"prompt": settings["dataset.query_field"], "response": settings["dataset.response_field"]}
    return {
        "data.dataset": name or {"file_name": path, "columns": columns},
        "data.truncation": "right",
        "data.max_token_len_per_gpu": max(longest, MICRO_BATCH_TOKENS),
    }


def _schedule(settings: dict[str, Any], file: Path) -> dict[str, Any]:
    """Its steps are of one batch, and an optimizer step follows each `gradient_accumulation_steps` of them."""
    accumulated, steps = settings["training.gradient_accumulation_steps"], settings["training.num_steps"]
    if not 1 <= accumulated <= steps:
        raise ValueError(
            f"{file}: training.gradient_accumulation_steps must be between 1 and training.num_steps={steps}, "
            f"got {accumulated}"
        )
    for key in ("training.batch_size", "dataset.max_seq_len"):
        if settings[key] < 1:
            raise ValueError(f"{file}: {key} must be at least 1, got {settings[key]}")
    return {
        "data.train_batch_size": settings["training.batch_size"] * accumulated,
        "trainer.total_training_steps": steps // accumulated,
        "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps_ratio": 0,
    }


def _devices(settings: dict[str, Any]) -> dict[str, Any]:
    devices = settings.get("model.devices") or [settings.get("model.device", 0)]
    return {} if devices == [0] else {"trainer.devices": devices}


def _quoted(value: Any) -> str:
    """`value` in Hydra's override grammar, where backslashes count before quotes only; OmegaConf's `${` is escaped."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_quoted, value)) + "]"
    if not isinstance(value, str):
        return str(value)
    text, quote = INTERPOLATION.sub(r"\1\1\\${", value), "'"
    parts = [part + "\\" * _trailing_backslashes(part) for part in text.split(quote)]
    return quote + f"\\{quote}".join(parts) + quote


def _trailing_backslashes(text: str) -> int:
    return len(text) - len(text.rstrip("\\"))
