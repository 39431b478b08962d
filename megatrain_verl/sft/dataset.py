"""The data sets of `dataset_info.json` as the torch data set that verl's SFT trainer takes (`data.custom_cls`)."""

import functools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from megatrain_verl.sft.chat_template import ChatTemplate, Encoded
from megatrain_verl.sft.conversations import UnusableRow, to_conversation
from megatrain_verl.sft.json_files import read_rows
from megatrain_verl.sft.registry import DatasetEntry, find_datasets

PARTS = ("all", "train", "held_out")
TRUNCATIONS = ("drop", "error", "right")


@dataclass(frozen=True)
class Limits:
    """Longest row in tokens, and what happens to longer ones."""

    max_length: int
    truncation: str

    def apply(self, encoded: Encoded, entry: DatasetEntry, row: int) -> Encoded:
        """`encoded` if it is short enough, cut to `max_length` with truncation "right".

        Raises:
            UnusableRow: it is too long (truncation "drop"), or nothing trained is left of it.
            ValueError: it is too long (truncation "error").
        """
        length = len(encoded.input_ids)
        if length > self.max_length and self.truncation == "error":
            raise ValueError(
                f"{entry.file}, row {row}: {length} tokens are more than data.max_length={self.max_length}; "
                "raise it, or set data.truncation=drop or right"
            )
        if length > self.max_length and self.truncation == "drop":
            raise UnusableRow(f"longer than data.max_length={self.max_length} tokens")
        cut = Encoded(encoded.input_ids[: self.max_length], encoded.loss_mask[: self.max_length])
        if not any(cut.loss_mask):
            raise UnusableRow(f"no assistant turn within data.max_length={self.max_length} tokens")
        return cut


class ChatDataset(Dataset):
    """Rendered conversations, all in memory; what was dropped is printed with counts by reason.

    Args:
        parquet_files: verl's name for what `data.train_files` or `data.val_files` holds; here a mapping with "names"
            (of data sets) and "part" (one of `PARTS`: every row, or what a held-out share leaves or takes).
        config: verl's `data` section; also "dataset_dir", "val_size" and "truncation" (one of `TRUNCATIONS`).
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
        if config.truncation not in TRUNCATIONS:
            raise ValueError(f"data.truncation must be one of {', '.join(TRUNCATIONS)}, got {config.truncation!r}")
        rows: list[Encoded] = []
        for name in parquet_files.names:
            rows += _encoded_rows(
                name,
                Path(config.dataset_dir).expanduser(),
                tokenizer,
                Limits(config.max_length, config.truncation),
                json.dumps(OmegaConf.to_container(config.apply_chat_template_kwargs, resolve=True)),
            )
        chosen = _part(len(rows), parquet_files.part, config)
        self._rows = [rows[index] for index in chosen][: max_samples if max_samples > 0 else None]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`input_ids`, `position_ids` and `loss_mask` of one row, each (L,) int64."""
        row = self._rows[index]
        return {
            "input_ids": torch.tensor(row.input_ids),
            "position_ids": torch.arange(len(row.input_ids)),
            "loss_mask": torch.tensor(row.loss_mask),
        }

    def largest_token(self) -> int:
        """The largest token id of all rows."""
        return max(max(row.input_ids) for row in self._rows)

    def end_of_turn(self) -> int:
        """The token id that most rows' training ends with."""
        last = Counter(row.input_ids[len(row.loss_mask) - 1 - row.loss_mask[::-1].index(1)] for row in self._rows)
        return last.most_common(1)[0][0]


def held_out_rows(rows: int, val_size: float, batch_size: int) -> range:
    """Which of `rows` are held out: `val_size` of them (below 1 a share), evenly spaced.

    Their number is a multiple of `batch_size`, since verl evaluates whole batches only.

    Raises:
        ValueError: not even one batch would be left to train on.
    """
    wanted = val_size if val_size >= 1 else val_size * rows
    count = -(-round(wanted) // batch_size) * batch_size or batch_size
    if rows - count < batch_size:
        raise ValueError(
            f"data.val_size={val_size} of {rows} usable rows holds out {count}, a multiple of "
            f"data.train_batch_size={batch_size}; less than one batch is left to train on"
        )
    return range(0, rows, rows // count)[:count]


def _part(rows: int, part: str, config: DictConfig) -> list[int]:
    if part == "all":
        return list(range(rows))
    held_out = held_out_rows(rows, config.val_size, config.train_batch_size)
    return list(held_out) if part == "held_out" else [index for index in range(rows) if index not in held_out]


@functools.lru_cache(maxsize=8)  # a held-out part is of the same rows as what it is taken from
def _encoded_rows(
    name: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    template_variables: str,
) -> list[Encoded]:
    (entry,) = find_datasets([name], folder)
    template = ChatTemplate(tokenizer, **json.loads(template_variables))
    report = _Report(entry)
    rows = list(_usable(entry, template, limits, report))
    report.print(rows)
    if "tools" in entry.columns and not template.takes_tools:
        print(
            "  the chat template does not show tools: they, their calls and results are written as text (Hermes format)"
        )
    return rows


def _usable(entry: DatasetEntry, template: ChatTemplate, limits: Limits, report: "_Report") -> Iterator[Encoded]:
    rows, columns = read_rows(entry)
    for number, row in enumerate(rows, start=1):
        try:
            encoded = limits.apply(template.encode(to_conversation(row, columns, entry)), entry, number)
        except UnusableRow as reason:
            report.drop(number, str(reason))
        except ValueError as error:
            raise ValueError(f"{entry.file}, row {number}: {error}") from error
        else:
            yield encoded


class _Report:
    """What was dropped of one data set, and why."""

    def __init__(self, entry: DatasetEntry) -> None:
        self._entry = entry
        self._counts: Counter[str] = Counter()
        self._first: dict[str, int] = {}

    def drop(self, row: int, reason: str) -> None:
        self._counts[reason] += 1
        self._first.setdefault(reason, row)

    def print(self, rows: list[Encoded]) -> None:
        """One line, and one per reason.

        Raises:
            ValueError: every row was dropped.
        """
        dropped = self._counts.total()
        reasons = [f"{count} dropped: {why} (first: row {self._first[why]})" for why, count in self._counts.items()]
        if not rows:
            raise ValueError(f"{self._entry.file} has no usable row of {dropped}: {'; '.join(reasons)}")
        tokens = sum(len(row.input_ids) for row in rows)
        trained = sum(sum(row.loss_mask) for row in rows)
        print(
            f"data set {self._entry.name}: {len(rows)} of {len(rows) + dropped} rows, {tokens} tokens, "
            f"{trained} of them trained"
        )
        for reason in reasons:
            print(f"  {reason}")
