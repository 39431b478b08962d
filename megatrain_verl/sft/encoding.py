"""A data set's rows as tokens, in a file that is mapped into memory: they may be more than memory holds."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import datasets
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from megatrain_verl.sft.chat_template import ChatTemplate, Encoded
from megatrain_verl.sft.conversations import UnusableRow, to_conversation
from megatrain_verl.sft.data_files import read_rows
from megatrain_verl.sft.image_template import ImageTemplate, processor_of
from megatrain_verl.sft.images import FEATURE
from megatrain_verl.sft.registry import DatasetEntry

TRUNCATIONS = ("drop", "error", "right")
ROWS_IN_MEMORY = 64
FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("int8")),
        "length": datasets.Value("int32"),
    }
)
IMAGE_FEATURES = {"text": datasets.Value("string"), "images": FEATURE}


@dataclass(frozen=True)
class RowSettings:
    """What is done to each row.

    Attributes:
        max_length: longest row in tokens.
        truncation: what happens to longer ones, one of `TRUNCATIONS`.
        system_prompt: the system message of rows that have none.
        train_on_prompt: train every token, not only those of assistant turns.
        template_variables: further variables of the chat template, as JSON text.
        max_samples: read so many rows only.
    """

    max_length: int
    truncation: str = "drop"
    system_prompt: str = ""
    train_on_prompt: bool = False
    template_variables: str = "{}"
    max_samples: int | None = None

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise ValueError(f"data.truncation must be one of {', '.join(TRUNCATIONS)}, got {self.truncation!r}")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"data.max_samples must be a number of rows or null, got {self.max_samples}")

    def template(self, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None = None) -> ChatTemplate:
        """The chat template with these settings: the processor's, of a model that takes images, or the tokenizer's."""
        kwargs = {"train_on_prompt": self.train_on_prompt, **json.loads(self.template_variables)}
        return ChatTemplate(tokenizer, **kwargs) if processor is None else ImageTemplate(processor, **kwargs)

    def cut(self, encoded: Encoded) -> Encoded:
        """`encoded` if it is short enough, cut to `max_length` with truncation "right".

        Raises:
            UnusableRow: it is too long (truncation "drop"), or nothing trained is left of it.
            ValueError: it is too long (truncation "error").
        """
        length = len(encoded.input_ids)
        if length > self.max_length and self.truncation == "error":
            raise ValueError(
                f"{length} tokens are more than data.max_length={self.max_length}; "
                "raise it, or set data.truncation=drop or right"
            )
        if length > self.max_length and self.truncation == "drop":
            raise UnusableRow(f"longer than data.max_length={self.max_length} tokens")
        cut = encoded.cut(self.max_length)
        if not any(cut.loss_mask):
            raise UnusableRow(f"no assistant turn within data.max_length={self.max_length} tokens")
        return cut


@dataclass(frozen=True)
class EncodedRows:
    """Usable rows with the columns of `FEATURES`, and what the model must know of their tokens.

    `turn_ends` counts the last trained token of each row; `report` says what was used and dropped.
    """

    rows: datasets.Dataset
    largest_token: int
    turn_ends: Counter[int]
    report: "Report"


def encode_dataset(
    entry: DatasetEntry,
    tokenizer: PreTrainedTokenizerBase,
    settings: RowSettings,
    processor: ProcessorMixin | None = None,
) -> EncodedRows:
    """Render and tokenize the rows of `entry`; what was dropped is printed with counts by reason.

    The tokens are written to a file in Python's temporary folder (TMPDIR), 5 bytes each, which is mapped and then
    removed: its space is free when the process ends, however it ends. With a `processor` (of a model that takes images)
    rows have their rendered text and where their images are, too.

    Raises:
        ValueError: names the file and row, or the option, that is wrong; also if no row is usable.
    """
    template = settings.template(tokenizer, processor_of(entry.name, "images" in entry.columns, tokenizer, processor))
    features = FEATURES if processor is None else datasets.Features({**FEATURES, **IMAGE_FEATURES})
    report = Report(entry)
    largest, ends = 0, Counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.arrow"
            with ArrowWriter(path=str(file), features=features, writer_batch_size=ROWS_IN_MEMORY) as writer:
                for encoded in usable_rows(entry, template, settings, report):
                    largest = max(largest, max(encoded.input_ids))
                    ends[encoded.input_ids[_last_trained(encoded)]] += 1
                    writer.write(encoded.columns())
                report.check_some_left()
                writer.finalize()
            rows = datasets.Dataset.from_file(str(file))
    except OSError as error:
        raise ValueError(
            f"{entry.source}: its tokens cannot be written to {tempfile.gettempdir()} ({error}); set the environment "
            "variable TMPDIR to a folder with more space"
        ) from error
    report.print()
    if "tools" in entry.columns and not template.takes_tools:
        print(
            "  the chat template does not show tools: they, their calls and results are written as text (Hermes format)"
        )
    return EncodedRows(rows, largest, ends, report)


def usable_rows(
    entry: DatasetEntry, template: ChatTemplate, settings: RowSettings, report: "Report"
) -> Iterator[Encoded]:
    """The rows of `entry` that can be trained on; what is dropped goes to `report`.

    Raises:
        ValueError: names the file and row that is broken.
    """
    rows, columns = read_rows(entry)
    for number, (place, row) in enumerate(rows):
        if number == settings.max_samples:
            return
        try:
            conversation = to_conversation(row, columns, entry, settings.system_prompt)
            encoded = settings.cut(template.encode(conversation))
        except UnusableRow as reason:
            report.drop(place, str(reason))
        except ValueError as error:
            raise ValueError(f"{entry.source}, {place}: {error}") from error
        else:
            report.keep(encoded)
            yield encoded


class Report:
    """How many rows of one data set are used, and why the others are not."""

    def __init__(self, entry: DatasetEntry) -> None:
        self._entry = entry
        self._rows = self._tokens = self._trained = 0
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def keep(self, encoded: Encoded) -> None:
        """Count a usable row."""
        self._rows += 1
        self._tokens += len(encoded.input_ids)
        self._trained += sum(encoded.loss_mask)

    def drop(self, place: str, reason: str) -> None:
        """Count the row at `place`."""
        self._counts[reason] += 1
        self._first.setdefault(reason, place)

    def check_some_left(self) -> None:
        """Refuse to go on without a row.

        Raises:
            ValueError: every row was dropped; says why.
        """
        if not self._rows:
            dropped = self._counts.total()
            raise ValueError(f"{self._entry.source} has no usable row of {dropped}: {'; '.join(self._reasons())}")

    def counts(self) -> dict[str, int]:
        """Usable and dropped rows, and the tokens of the usable ones."""
        return {
            "rows": self._rows,
            "dropped": self._counts.total(),
            "tokens": self._tokens,
            "trained": self._trained,
        }

    def print(self, output: TextIO | None = None) -> None:
        """One line, and one per reason."""
        print(
            f"data set {self._entry.name}: {self._rows} of {self._rows + self._counts.total()} rows, "
            f"{self._tokens} tokens, {self._trained} of them trained",
            file=output,
        )
        for reason in self._reasons():
            print(f"  {reason}", file=output)

    def _reasons(self) -> list[str]:
        return [f"{count} dropped: {why} (first: {self._first[why]})" for why, count in self._counts.most_common()]


def _last_trained(encoded: Encoded) -> int:
    return len(encoded.loss_mask) - 1 - encoded.loss_mask[::-1].index(1)
