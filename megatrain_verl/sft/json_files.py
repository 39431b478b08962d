"""Rows of JSON and JSON Lines files, read with the `datasets` library; a broken file is named with its place."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from megatrain_verl.sft.registry import REGISTRY, DatasetEntry


def read_rows(entry: DatasetEntry) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of a data set's file and the columns to read: the format's name of each, and the file's.

    Raises:
        ValueError: an empty or broken file, or a mapped column that the file does not have.
    """
    if entry.file.stat().st_size == 0:
        raise ValueError(f"{entry.file} is empty")
    try:
        with tempfile.TemporaryDirectory() as cache:
            table = datasets.load_dataset(
                "json", data_files=str(entry.file), split="train", cache_dir=cache, keep_in_memory=True
            )
            rows = list(table)
    except (DatasetGenerationError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(_diagnosis(entry.file) or f"{entry.file} cannot be read: {_root_cause(error)}") from error
    return rows, _columns(entry, table.column_names)


def _columns(entry: DatasetEntry, present: list[str]) -> dict[str, str]:
    for name, column in entry.columns.items():
        if column not in present:
            raise ValueError(
                f"data set {entry.name}: columns.{name} is {column!r}, but {entry.file} has the columns "
                f"{', '.join(present)}; correct the mapping in {REGISTRY}"
            )
    return entry.columns | {name: column for name, column in entry.optional_columns.items() if column in present}


def _diagnosis(file: Path) -> str | None:
    """What is wrong where, found by reading `file` once more row by row; None if it is JSON with rows."""
    content = file.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return f"{file}, line {line}: not UTF-8 ({error.reason} at byte {error.start})"
    row = 0
    try:
        for row, value in enumerate(_array(text) if text.lstrip().startswith("[") else _lines(text), start=1):
            if not isinstance(value, dict):
                return f"{file}, row {row}: a row must be a JSON object, got {json.dumps(value)[:60]}"
    except json.JSONDecodeError as error:
        return f"{file}, row {row + 1} (line {error.lineno}, column {error.colno}): not JSON: {error.msg}"
    return None if row else f"{file} has no rows"


def _lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                error.lineno = number
                raise


def _array(text: str) -> Iterator[Any]:
    decoder, position = json.JSONDecoder(), _skip_space(text, text.index("[") + 1)
    while text[position : position + 1] != "]":
        value, position = decoder.raw_decode(text, position)
        yield value
        position = _skip_space(text, position)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            raise json.JSONDecodeError("expected , or ]", text, position)


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
