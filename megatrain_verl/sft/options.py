"""What the options of an SFT run say, checked before the model is loaded."""

import os
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from transformers import PretrainedConfig

from megatrain_verl.sft import dataset, option_rules
from megatrain_verl.streaming.attention import check_available
from megatrain_verl.verl_backend import loggers, registration


def prepare(config: DictConfig, device: str) -> None:
    """Fill in `config` (a whole run) what follows from its options: verl's data files and class, and the device.

    Raises:
        ValueError: a value that an option cannot have, no data, evaluation without data, or options that exclude each
            other.
    """
    option_rules.check(config)
    data, trainer = config.data, config.trainer
    trainer.device = device
    registration.refuse_several_hosts(trainer.nnodes)
    _check_ranks(data, trainer)
    if "wandb" in trainer.logger:
        _check_wandb()
    if data.dataset:
        _use_registry(data, trainer.seed)
    elif not data.train_files:
        raise ValueError("no data: set data.dataset to names in dataset_info.json of data.dataset_dir")
    elif data.truncation == "drop":  # verl's own class cannot drop
        data.truncation = "error"
    if trainer.early_stop_patience is not None and trainer.test_freq == -1:
        raise ValueError(
            "trainer.early_stop_patience counts evaluations; set trainer.test_freq to evaluate during the run"
        )
    evaluates = trainer.test_freq == "after_each_epoch" or trainer.test_freq > 0
    if evaluates and not data.val_files:
        raise ValueError("trainer.test_freq evaluates; set data.val_size or data.val_dataset to what it evaluates on")
    if data.packing and not data.dataset:
        raise ValueError("data.packing packs the rows of data.dataset; set it to false with data.train_files")
    if data.packing and not data.use_dynamic_bsz:
        raise ValueError("data.packing needs data.use_dynamic_bsz=True: a pack is a micro-batch")
    if data.pad_mode != "no_padding":
        raise ValueError(f"data.pad_mode must be no_padding: megatrain packs rows, got {data.pad_mode}")
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < data.max_length:
        raise ValueError(
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} is less than data.max_length={data.max_length}: "
            "one row would not fit into a micro-batch"
        )


def devices(config: DictConfig) -> list[str]:
    """The devices of the processes to start, as in CUDA_VISIBLE_DEVICES; none where this process trains.

    Raises:
        ValueError: there are not so many, or a launcher has started several processes already.
    """
    trainer = config.trainer
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the run starts its own processes: set trainer.devices, and start it once, without torchrun")
    if trainer.devices is None and trainer.n_gpus_per_node == 1:
        return []
    wanted = list(range(trainer.n_gpus_per_node) if trainer.devices is None else trainer.devices)
    if trainer.device == "cpu":
        return [str(number) for number in wanted]
    there = torch.cuda.device_count()
    if max(wanted) >= there:
        option = "trainer.n_gpus_per_node" if trainer.devices is None else "the numbers in trainer.devices"
        raise ValueError(f"device {max(wanted)} is asked for, but {there} are here, counted from 0; lower {option}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) if visible is None else visible.split(",")[number].strip() for number in wanted]


def _check_ranks(data: DictConfig, trainer: DictConfig) -> None:
    if trainer.devices is not None:
        trainer.n_gpus_per_node = len(trainer.devices)
    size = trainer.n_gpus_per_node
    if data.train_batch_size % size:
        raise ValueError(f"data.train_batch_size={data.train_batch_size} must be a multiple of the {size} devices")
    if not data.use_dynamic_bsz and data.train_batch_size // size % data.micro_batch_size_per_gpu:
        raise ValueError(
            f"data.train_batch_size={data.train_batch_size} on {size} devices must be a multiple of "
            f"data.micro_batch_size_per_gpu={data.micro_batch_size_per_gpu} with data.use_dynamic_bsz=False"
        )


def check_model(config: DictConfig, hf_config: PretrainedConfig) -> None:
    """Refuse rows longer than the model takes, and an attention kernel that is not here.

    Raises:
        ValueError: names the option and the remedy.
    """
    engine = config.engine
    registration.lora_settings(config.model)
    registration.check_lora_only(config.model, config.checkpoint)
    check_available(engine.attn_implementation, engine.dtype, config.trainer.device)
    limit, name = engine.max_seq_len, "engine.max_seq_len"
    if limit is None:
        limit, name = (
            getattr(hf_config.get_text_config(), "max_position_embeddings", None),
            "the model's max_position_embeddings",
        )
    if limit is not None and config.data.max_length > limit:
        raise ValueError(
            f"data.max_length={config.data.max_length} exceeds {name}={limit}; set data.max_length={limit}"
        )


def metrics_path(config: DictConfig) -> Path:
    """Where verl's `file` logger writes."""
    return loggers.metrics_path(Path(config.trainer.default_local_dir) / "metrics.jsonl")


def _check_wandb() -> None:
    import wandb  # takes seconds

    try:
        if wandb.setup().settings.mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False):
            return
        reason = "there is no key"
    except wandb.Error as error:
        reason = str(error)
    raise ValueError(
        f"trainer.logger has wandb, but {reason}: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
    )


def _use_registry(data: DictConfig, seed: int) -> None:
    if data.train_files or data.val_files:
        raise ValueError("data.dataset names the data; set data.train_files and data.val_files to null")
    if data.val_dataset and data.val_size:
        raise ValueError("data.val_dataset and data.val_size exclude each other: set one of them")
    with open_dict(data):
        data.seed = seed
        data.custom_cls = {"path": f"pkg://{dataset.__name__}", "name": dataset.ChatDataset.__name__}
        data.train_files = {"names": names(data.dataset), "part": "train"}
        if data.val_dataset:
            data.val_files = {"names": names(data.val_dataset), "part": "all"}
        elif data.val_size:
            data.val_files = {"names": names(data.dataset), "part": "held_out"}


def names(given: str | DictConfig | ListConfig) -> list[str | dict[str, Any]]:
    """The data sets of data.dataset: names separated by commas, one description, or a list of both."""
    if isinstance(given, DictConfig):
        given = [given]
    elif not isinstance(given, ListConfig):
        given = str(given).split(",")
    return [
        OmegaConf.to_container(item, resolve=True) if isinstance(item, DictConfig) else str(item).strip()
        for item in given
    ]
