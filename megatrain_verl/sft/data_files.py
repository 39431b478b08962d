"""Rows of a data set's files: JSON by `json_files.py`, Parquet, CSV, Arrow and hub data sets by `datasets`."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from megatrain_verl.sft.json_files import read_json
from megatrain_verl.sft.registry import REGISTRY, DatasetEntry

Row = dict[str, Any]
TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
SAVED = ("state.json", "dataset_dict.json")  # what `Dataset.save_to_disk` leaves in its folder
LOOK_AHEAD = 1000  # rows whose keys are the columns that a file has
# What `datasets` raises for a broken file (not all of it documented) and for a hub that cannot be reached.
UNREADABLE = (DatasetGenerationError, pyarrow.ArrowException, ValueError, TypeError, KeyError)
UNREACHABLE = (DatasetNotFoundError, OSError, ValueError)


def read_rows(entry: DatasetEntry) -> tuple[Iterator[tuple[str, Row]], dict[str, str]]:
    """The rows of a data set, each after its place in the source, and the columns to read: the format's name of each,
    and the file's.

    Rows are read as they are asked for; memory holds `LOOK_AHEAD` of them.

    Raises:
        ValueError: an empty or broken file, or a mapped column that the rows do not have. What is broken further on is
            raised when it is reached.
    """
    rows = _hub_rows(entry) if entry.hub_name else _file_rows(entry)
    first = list(itertools.islice(rows, LOOK_AHEAD))
    if not first:
        raise ValueError(f"{entry.source} has no rows")
    present = list(dict.fromkeys(key for _, row in first for key in row))
    return itertools.chain(first, rows), _columns(entry, present)


def _columns(entry: DatasetEntry, present: list[str]) -> dict[str, str]:
    for name, column in entry.columns.items():
        if column not in present:
            raise ValueError(
                f"data set {entry.name}: columns.{name} is {column!r}, but {entry.source} has the columns "
                f"{', '.join(present)}; correct the mapping in {REGISTRY}"
            )
    return entry.columns | {name: column for name, column in entry.optional_columns.items() if column in present}


def _file_rows(entry: DatasetEntry) -> Iterator[tuple[str, Row]]:
    path = entry.file
    if path.is_dir() and any((path / name).is_file() for name in SAVED):
        yield from _numbered(_saved_rows(entry))
        return
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no files")
    types = {_type(file) for file in files}
    if len(types) > 1:
        raise ValueError(f"{path} has files of several types: {', '.join(sorted(types))}")
    for file in files:
        yield from _numbered(_rows_of_file(file), "" if file == path else f"{file.name}, ")


def _numbered(rows: Iterator[Row], file: str = "") -> Iterator[tuple[str, Row]]:
    return ((f"{file}row {number}", row) for number, row in enumerate(rows, start=1))


def _type(file: Path) -> str:
    kind = TYPES.get(file.suffix.lower())
    if kind is None:
        raise ValueError(f"{file}: the type of a data file must be one of {', '.join(TYPES)}")
    return kind


def _rows_of_file(file: Path) -> Iterator[Row]:
    kind = _type(file)
    if not file.stat().st_size:
        raise ValueError(f"{file} is empty")
    if kind == "json":
        yield from read_json(file)
        return
    try:
        options = _as_text(file) if kind == "csv" else {}
        yield from datasets.load_dataset(kind, data_files=str(file), split="train", streaming=True, **options)
    except UNREADABLE as error:
        raise ValueError(f"{file} cannot be read as {kind}: {_root_cause(error)}") from error


def _as_text(file: Path) -> dict[str, Any]:
    """Options of the CSV reader by which an answer "007" or "None" stays what it is."""
    columns = pandas.read_csv(file, nrows=0).columns
    features = datasets.Features({column: datasets.Value("string") for column in columns})
    return {"features": features, "keep_default_na": False}


def _saved_rows(entry: DatasetEntry) -> Iterator[Row]:
    try:
        saved = datasets.load_from_disk(str(entry.file))
    except (*UNREADABLE, OSError) as error:
        raise ValueError(f"{entry.file} cannot be read as a saved data set: {_root_cause(error)}") from error
    if isinstance(saved, datasets.DatasetDict):
        if entry.split not in saved:
            raise ValueError(f"{entry.file} has no split {entry.split!r}; it has {', '.join(saved)}")
        saved = saved[entry.split]
    yield from saved


def _hub_rows(entry: DatasetEntry) -> Iterator[tuple[str, Row]]:
    """The hub's rows, from its cache on this machine if they are there."""
    try:
        loaded = datasets.load_dataset(
            entry.hub_name,
            name=entry.subset,
            data_dir=entry.folder,
            split=entry.split,
            revision=entry.revision,
        )
    except UNREACHABLE as error:
        raise ValueError(
            f"data set {entry.name}: {entry.source} cannot be loaded ({_root_cause(error)}); without a connection, "
            f"download it and name its files by file_name in {REGISTRY}"
        ) from error
    yield from _numbered(loaded)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:300]
