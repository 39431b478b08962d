"""Checks of verl's prompt files, with verl's own reader and length filter."""

import os

import pyarrow.parquet
from datasets.exceptions import DatasetGenerationError
from omegaconf import DictConfig, ListConfig, OmegaConf
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import RLHFDataset

ROW = "megatrain_verl_row"


def check(data: DictConfig, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None) -> None:
    """Refuse prompt files from which verl could not train; `data` is verl's `data` section.

    Raises:
        ValueError: a missing, unreadable or empty file; fewer usable prompts than one training batch; a prompt over
            `data.max_prompt_length` that `data` does not say to drop or to cut. (verl's agent loop would cut it on
            the left with `data.truncation=error` too.)
    """
    least_rows = {"train_files": data.train_batch_size, "val_files": 1}
    for option in least_rows:
        files = data[option]
        for file in files if isinstance(files, list | ListConfig) else [files]:
            _check_file(option, file)
    for option, least in least_rows.items():
        usable = _usable_prompts(data, option, tokenizer, processor)
        if usable < least:
            raise ValueError(
                f"data.{option} = {data[option]} has {usable} usable prompts (up to data.max_prompt_length="
                f"{data.max_prompt_length} tokens), but at least {least} are needed"
            )


def _check_file(option: str, file: str) -> None:
    path = os.path.expanduser(file)
    if "://" in file:
        return
    if not os.path.exists(path):
        raise ValueError(f"data.{option}: {path} does not exist")
    if path.endswith(".parquet") and pyarrow.parquet.read_metadata(path).num_rows == 0:
        raise ValueError(f"data.{option}: {path} has no rows")


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
    if not isinstance(dataset, RLHFDataset) or not (data.filter_overlong_prompts or data.truncation == "error"):
        return len(dataset)

    dataset.filter_overlong_prompts = True
    numbered = dataset.dataframe.add_column(ROW, list(range(len(dataset))))
    kept = set(dataset.maybe_filter_out_long_prompts(numbered)[ROW])
    too_long = [row for row in range(len(dataset)) if row not in kept]
    if too_long and not data.filter_overlong_prompts:
        raise ValueError(
            f"data.{option} = {data[option]}: {len(too_long)} of {len(dataset)} prompts, the first in row "
            f"{too_long[0]}, are longer than data.max_prompt_length={data.max_prompt_length} tokens; set "
            "data.filter_overlong_prompts=True to drop them, data.truncation=left to cut them, or raise the limit"
        )
    return len(kept)
