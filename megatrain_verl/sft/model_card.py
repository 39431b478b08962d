"""The README.md beside a trained model: data, settings and results of its run."""

import importlib.metadata
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from omegaconf import DictConfig

from megatrain_verl.sft.run_state import RunState, perplexity

# Options worth a row, by what the card calls them.
SETTINGS = {
    "trained on": "data.train_on_prompt",
    "longest row (tokens)": "data.max_length",
    "rows per step": "data.train_batch_size",
    "packing": "data.packing",
    "learning rate": "optim.lr",
    "schedule": "optim.lr_scheduler_type",
    "schedule's arguments": "optim.lr_scheduler_kwargs",
    "warm-up steps": "optim.lr_warmup_steps",
    "warm-up ratio": "optim.lr_warmup_steps_ratio",
    "weight decay": "optim.weight_decay",
    "AdamW betas": "optim.betas",
    "AdamW options": "optim.override_optimizer_config",
    "gradient clipping": "optim.clip_grad",
    "compute type": "engine.dtype",
    "seed": "trainer.seed",
}
LORA_SETTINGS = {
    "LoRA rank": "model.lora_rank",
    "LoRA alpha": "model.lora_alpha",
    "modules with LoRA": "model.target_modules",
    "modules without LoRA": "model.exclude_modules",
}
PACKAGES = ("megatrain-verl", "verl", "torch", "transformers")


def text(
    config: DictConfig, data: list[dict[str, Any]], parameters: int, trained: int, steps: int, state: RunState
) -> str:
    """The card, in the hub's format.

    Args:
        data: per data set what `ChatDataset.description` says, with "name".
        parameters, trained: of the model with its adapters, and how many of them are not frozen.
        steps: of the whole run.
    """
    base = _base_model(config.model.path) + (" with LoRA adapters" if _has_lora(config) else "")
    share = "all" if trained == parameters else f"{trained:,}"
    front = ModelCardData(
        library_name="peft" if config.checkpoint.get("save_lora_only", False) else "transformers",
        pipeline_tag="text-generation",
        base_model=None if Path(config.model.path).expanduser().exists() else config.model.path,
        tags=["sft", "megatrain_verl", "verl"],
    )
    return "\n".join(
        [
            f"---\n{front.to_yaml()}\n---",
            f"# {config.trainer.experiment_name}",
            f"{base}, {parameters:,} parameters, {share} of them fine-tuned by `python -m megatrain_verl.sft`.",
            "## Data",
            *_table(["data set", "rows used", "rows dropped", "tokens", "trained tokens"], _data_rows(data)),
            "## Settings",
            *_table(["setting", "value"], _setting_rows(config)),
            "## Results",
            *_table(["result", "value"], _result_rows(state, steps)),
            "## Versions",
            ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES) + "\n",
        ]
    )


def _base_model(path: str) -> str:
    """The model's name; of a folder only the last part, since the rest is of one machine."""
    expanded = Path(path).expanduser()
    return f"Base model {expanded.resolve().name if expanded.exists() else path}"


def _has_lora(config: DictConfig) -> bool:
    return config.model.get("lora_rank", 0) > 0


def _data_rows(data: list[dict[str, Any]]) -> Iterable[list[Any]]:
    for entry in data:
        yield [entry["name"], *(f"{entry[name]:,}" for name in ("rows", "dropped", "tokens", "trained"))]


def _setting_rows(config: DictConfig) -> Iterable[list[Any]]:
    for name, option in (SETTINGS | (LORA_SETTINGS if _has_lora(config) else {})).items():
        section, key = option.split(".")
        value = config[section][key]
        if option == "data.train_on_prompt":
            value = "all tokens" if value else "assistant turns"
        if value is not None and not (option == "optim.lr_warmup_steps" and value <= 0):
            yield [name, value]


def _result_rows(state: RunState, steps: int) -> Iterable[list[Any]]:
    yield ["steps", f"{state.step} of {steps}"]
    yield ["tokens", f"{state.tokens:,}"]
    if state.train_loss is not None:
        yield ["training loss of the last step", f"{state.train_loss:.4f}"]
    if state.val_loss is not None:
        yield [f"validation loss at step {state.val_step}", f"{state.val_loss:.4f}"]
        yield [f"validation perplexity at step {state.val_step}", f"{perplexity(state.val_loss):.3f}"]
    if state.best_loss is not None and math.isfinite(state.best_loss):
        yield ["best validation loss", f"{state.best_loss:.4f} (step {state.best_step})"]


def _table(header: list[str], rows: Iterable[list[Any]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["", *("| " + " | ".join(map(str, line)) + " |" for line in lines), ""]
