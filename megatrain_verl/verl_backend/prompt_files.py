"""Checks of verl's prompt files, with verl's own reader and length filter."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError
from omegaconf import DictConfig, ListConfig, OmegaConf
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import RLHFDataset

from megatrain_verl.sft.json_files import read_json

logger = logging.getLogger(__name__)
ROW = "megatrain_verl_row"


def check(data: DictConfig, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None) -> None:
    """Refuse prompt files from which verl could not train; `data` is verl's `data` section.

    Prompts that verl will drop are counted in the log.

    Raises:
        ValueError: a missing, unreadable or empty file; no column `data.prompt_key`, or a row in which it does not
            hold messages (verl would count it as too long); images that verl would leave out or cannot read, or more
            or fewer of them than a row's messages show; fewer usable prompts than one training batch; a prompt over
            `data.max_prompt_length` that `data` does not say to drop or to cut. (verl's agent loop would cut
            it on the left with `data.truncation=error` too.)
    """
    least_rows = {"train_files": data.train_batch_size, "val_files": 1}
    for option in least_rows:
        for file in _listed(data[option]):
            _check_file(option, file)
    for option, least in least_rows.items():
        usable = _usable_prompts(data, option, tokenizer, processor)
        if usable < least:
            raise ValueError(
                f"data.{option} = {data[option]} has {usable} usable prompts (up to data.max_prompt_length="
                f"{data.max_prompt_length} tokens), but at least {least} are needed"
            )


def _listed(files: str | list[str] | ListConfig) -> list[str]:
    return list(files) if isinstance(files, list | ListConfig) else [files]


def _check_file(option: str, file: str) -> None:
    path = os.path.expanduser(file)
    if "://" in file:
        return
    if not os.path.exists(path):
        raise ValueError(f"data.{option}: {path} does not exist")
    if path.endswith(".parquet") and pyarrow.parquet.read_metadata(path).num_rows == 0:
        raise ValueError(f"data.{option}: {path} has no rows")
    if path.endswith((".json", ".jsonl")):  # `datasets` would name neither an empty file nor the line of an error
        try:
            for _ in read_json(Path(path)):
                pass
        except ValueError as error:
            raise ValueError(f"data.{option}: {error}") from error


def _usable_prompts(
    data: DictConfig, option: str, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
) -> int:
    is_train = option == "train_files"
    max_samples = data.get("train_max_samples" if is_train else "val_max_samples", -1)
    unfiltered = OmegaConf.merge(data, {"filter_overlong_prompts": False})
    try:
        dataset = create_rl_dataset(
            data[option], unfiltered, tokenizer, processor, is_train=is_train, max_samples=max_samples
        )
    except DatasetGenerationError as error:
        raise ValueError(f"data.{option} = {data[option]} cannot be read: {error.__cause__ or error}") from error
    if not isinstance(dataset, RLHFDataset):
        return len(dataset)
    _check_prompts(option, data, dataset)
    _check_images(option, data, dataset, processor)
    if not (data.filter_overlong_prompts or data.truncation == "error"):
        return len(dataset)

    dataset.filter_overlong_prompts = True
    numbered = dataset.dataframe.add_column(ROW, list(range(len(dataset))))
    kept = set(dataset.maybe_filter_out_long_prompts(numbered)[ROW])
    too_long = [row for row in range(len(dataset)) if row not in kept]
    if processor is not None:
        _check_readable(option, data, dataset, too_long)
    if too_long and not data.filter_overlong_prompts:
        raise ValueError(
            f"data.{option} = {data[option]}: {len(too_long)} of {len(dataset)} prompts, the first in row "
            f"{too_long[0]}, are longer than data.max_prompt_length={data.max_prompt_length} tokens; set "
            "data.filter_overlong_prompts=True to drop them, data.truncation=left to cut them, or raise the limit"
        )
    if too_long:
        logger.warning(
            "data.%s = %s: dropped %d of %d prompts, longer than data.max_prompt_length=%d tokens",
            *(option, data[option], len(too_long), len(dataset), data.max_prompt_length),
        )
    return len(kept)


def _check_prompts(option: str, data: DictConfig, dataset: RLHFDataset) -> None:
    """Every row has messages under `data.prompt_key`."""
    key, columns = data.prompt_key, dataset.dataframe.column_names
    if key not in columns:
        raise ValueError(
            f"data.{option} = {data[option]} has no column {key}, but {', '.join(columns)}: set data.prompt_key"
        )
    for row, messages in enumerate(dataset.dataframe[key]):
        if not _are_messages(messages):
            raise ValueError(
                f"data.{option} = {data[option]}, row {row}: column {key} (data.prompt_key) must be a list of "
                f"messages with role and content, got {str(messages)[:60]!r}"
            )


def _check_images(option: str, data: DictConfig, dataset: RLHFDataset, processor: ProcessorMixin | None) -> None:
    """verl can read images if there are any, and messages show as many as their row has.

    verl leaves out the images of prompts for which it has no processor.
    """
    key = data.get("image_key", "images")
    if key not in dataset.dataframe.column_names or not any(dataset.dataframe[key]):
        return
    where = f"data.{option} = {data[option]}"
    if processor is None:
        raise ValueError(
            f"{where} has images in column {key} (data.image_key), but verl has no processor for the model: it takes "
            "text only, its processor cannot be loaded (Qwen's needs torchvision), or it is not one that verl 0.9.1 "
            "knows (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)"
        )
    if find_spec("qwen_vl_utils") is None:
        raise ValueError(
            f"{where} has images in column {key} (data.image_key), which verl reads by a package that is not "
            "installed: pip install qwen-vl-utils"
        )
    rows = zip(dataset.dataframe[data.prompt_key], dataset.dataframe[key], strict=True)
    for row, (messages, images) in enumerate(rows):
        texts = [message["content"] for message in messages if isinstance(message["content"], str)]
        shown = sum(text.count("<image>") for text in texts)
        if shown != len(images or ()):
            raise ValueError(f"{where}, row {row}: its messages have {shown} <image> for {len(images or ())} images")


def _check_readable(option: str, data: DictConfig, dataset: RLHFDataset, rows: list[int]) -> None:
    """Name the first of `rows` whose images cannot be read: verl counts such rows as too long."""
    for row in rows:
        try:
            messages = dataset._build_messages(dataset.dataframe[row], key=data.prompt_key)
            dataset._process_multi_modal_info(messages, dataset.image_patch_size, dataset.config)
        except Exception as error:  # of whatever kind Pillow and qwen-vl-utils raise
            raise ValueError(f"data.{option} = {data[option]}, row {row}: cannot read its images: {error}") from error


def _are_messages(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and message.keys() >= {"role", "content"} for message in value)
