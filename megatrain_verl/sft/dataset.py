"""The data sets of `dataset_info.json` as the torch data set that verl's SFT trainer takes (`data.custom_cls`)."""

import functools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from megatrain_verl.packing import first_fit_decreasing
from megatrain_verl.sft import mixture
from megatrain_verl.sft.encoding import EncodedRows, RowSettings, encode_dataset
from megatrain_verl.sft.image_template import pixel_inputs
from megatrain_verl.sft.registry import DatasetEntry, find_datasets
from megatrain_verl.streaming.images import join_images

PARTS = ("all", "train", "held_out")


class ChatDataset(Dataset):
    """Rendered conversations; what was dropped is printed with counts by reason.

    With "packing" an item of the part "train" is a pack: several rows in one, whose positions start at 0 again for
    each. The first token of a row is never trained, so no row predicts into the next.

    Args:
        parquet_files: verl's name for what `data.train_files` or `data.val_files` holds; here a mapping with "names"
            (of data sets, or descriptions of some) and "part" (one of `PARTS`: every row; what training takes, mixed;
            or what is held out of it).
        config: verl's `data` section with the options of `megatrain_sft.yaml`, and "seed".
        max_samples: take the first rows only; -1 for all.

    Raises:
        ValueError: names the file, row and column, or the option, that is wrong; also if no row is usable.
    """

    def __init__(
        self,
        parquet_files: DictConfig,
        tokenizer: PreTrainedTokenizerBase,
        config: DictConfig,
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        names, part = OmegaConf.to_container(parquet_files.names, resolve=True), parquet_files.part
        folder, settings = folder_of(config), row_settings(config)
        entries = [_entry(name, folder) for name in names]
        self._names = [entry.name for entry in entries]
        self._sources = [_encoded(json.dumps(name), folder, tokenizer, processor, settings) for name in names]
        rows = _part([source.rows for source in self._sources], entries, part, config)
        rows = rows.select(range(min(max_samples, len(rows)))) if max_samples > 0 else rows
        lengths = np.asarray(rows.with_format("numpy")["length"][:])
        self._rows = rows.with_format("torch", columns=["input_ids", "loss_mask"])
        self._processor = processor
        self._images = None if processor is None else rows.select_columns(["text", "images"])
        self.packs: list[list[int]] | None = None
        if config.packing and part == "train":
            self.packs = first_fit_decreasing(lengths.tolist(), config.max_token_len_per_gpu)
            full = lengths.sum() / (len(self.packs) * config.max_token_len_per_gpu)
            print(f"packing: {len(rows)} rows in {len(self.packs)} packs, {full:.1%} full")

    def __len__(self) -> int:
        return len(self._rows) if self.packs is None else len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids`, `position_ids` and `loss_mask` of one row or pack, each (L,) int64.

        Of a model that takes images also `multi_modal_inputs`: pixels and sizes of the images, empty without.
        """
        numbers = [index] if self.packs is None else self.packs[index]
        rows = [self._rows[number] for number in numbers]
        return {
            "input_ids": torch.cat([row["input_ids"] for row in rows]),
            "position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in rows]),
            "loss_mask": torch.cat([row["loss_mask"] for row in rows]),
            **self._pixels(numbers),
        }

    def _pixels(self, numbers: list[int]) -> dict[str, dict[str, Tensor]]:
        if self._images is None:
            return {}
        rows = (self._images[number] for number in numbers)
        inputs = [pixel_inputs(self._processor, row["text"], row["images"]) for row in rows if row["images"]]
        return {"multi_modal_inputs": join_images(inputs) or {}}

    def description(self) -> list[dict[str, Any]]:
        """Of each data set its name, and the counts of `Report.counts` before any are held out or mixed."""
        return [
            {"name": name, **source.report.counts()} for name, source in zip(self._names, self._sources, strict=True)
        ]

    def largest_token(self) -> int:
        """The largest token id of all usable rows."""
        return max(source.largest_token for source in self._sources)

    def end_of_turn(self) -> int:
        """The token id that most rows' training ends with."""
        return sum((source.turn_ends for source in self._sources), Counter()).most_common(1)[0][0]


def folder_of(config: DictConfig) -> Path:
    """The folder of dataset_info.json that the `data` section `config` names."""
    return Path(config.dataset_dir).expanduser()


def row_settings(config: DictConfig) -> RowSettings:
    """What the `data` section `config` says about single rows."""
    return RowSettings(
        max_length=config.max_length,
        truncation=config.truncation,
        system_prompt=config.system_prompt or "",
        train_on_prompt=config.train_on_prompt,
        template_variables=json.dumps(OmegaConf.to_container(config.apply_chat_template_kwargs, resolve=True)),
        max_samples=config.max_samples,
    )


def _part(
    parts: list[datasets.Dataset], entries: list[DatasetEntry], part: str, config: DictConfig
) -> datasets.Dataset:
    if part == "all":
        return datasets.concatenate_datasets(parts)
    if config.val_size:
        held_out = mixture.held_out_rows(sum(map(len, parts)), config.val_size, config.train_batch_size)
        parts = mixture.split(parts, held_out, taken=part == "held_out")
    return datasets.concatenate_datasets(parts) if part == "held_out" else mixture.mix(parts, entries, config)


def _entry(name: str | Mapping[str, Any], folder: Path) -> DatasetEntry:
    return find_datasets([name], folder)[0]


@functools.lru_cache(maxsize=8)  # a held-out part is of the same rows as what it is taken from
def _encoded(
    name: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    settings: RowSettings,
) -> EncodedRows:
    return encode_dataset(_entry(json.loads(name), folder), tokenizer, settings, processor)
