"""`dataset_info.json`, LLaMA-Factory's registry of data sets: where the rows are, and how their columns are called."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_verl.sft.known import check_known

REGISTRY = "dataset_info.json"
KEYS = (
    "file_name",
    "hf_hub_url",
    "formatting",
    "columns",
    "tags",
    "subset",
    "split",
    "folder",
    "revision",
    "num_samples",
    "ranking",
    "ms_hub_url",
    "om_hub_url",
    "script_url",
    "cloud_file_name",
)
COLUMNS = {
    "alpaca": ("prompt", "query", "response", "history", "system", "tools", "images"),
    "sharegpt": ("messages", "system", "tools", "images"),
    "openai": ("messages", "system", "tools", "images"),
}
OTHER_COLUMNS = {  # LLaMA-Factory's, of data that is not chat in text and images
    "videos": "videos",
    "audios": "audio",
    "chosen": "preference data",
    "rejected": "preference data",
    "kto_tag": "preference data",
}
REQUIRED_COLUMNS = {
    "alpaca": {"prompt": "instruction", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
OPTIONAL_COLUMNS = {  # of an entry that maps no columns
    "alpaca": {"query": "input"},
    "sharegpt": {},
    "openai": {"tools": "tools"},
}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}


@dataclass(frozen=True)
class DatasetEntry:
    """One data set: `columns` maps the format's names to the file's, `tags` the names inside a message.

    `optional_columns` are read where the rows have them. Rows come from `file` (a file or folder), or from the hub's
    `hub_name` if that is set; `subset`, `folder` and `revision` are the hub's. Relative paths of images start in
    `image_folder`.
    """

    name: str
    file: Path | None
    hub_name: str | None
    formatting: str
    columns: dict[str, str]
    optional_columns: dict[str, str]
    tags: dict[str, str]
    split: str = "train"
    subset: str | None = None
    folder: str | None = None
    revision: str | None = None
    num_samples: int | None = None
    image_folder: Path = Path()

    @property
    def source(self) -> str:
        """Where the rows come from, for messages."""
        return str(self.file) if self.hub_name is None else f"hub data set {self.hub_name}"


def find_datasets(names: list[str | Mapping[str, Any]], folder: Path) -> list[DatasetEntry]:
    """The entries `names` of `folder`/dataset_info.json, whose files lie in `folder`.

    Instead of a name, the description itself may be given, as the registry would have it; its file is then relative to
    the current folder.

    Raises:
        ValueError: no or a broken registry, an unknown name, a key or column that is not supported, no such file.
    """
    registry = _registry(folder / REGISTRY) if any(isinstance(name, str) for name in names) else {}
    return [_named(name, registry, folder) if isinstance(name, str) else _described(name) for name in names]


def _registry(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"data.dataset_dir={path.parent} has no {REGISTRY}, which says what the data sets there are")
    try:
        registry = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(registry, dict):
        raise ValueError(f"{path} must map names of data sets to their descriptions")
    return registry


def _named(name: str, registry: dict[str, Any], folder: Path) -> DatasetEntry:
    path = folder / REGISTRY
    check_known(name, registry, f"data set in {path}")
    return _entry(name, registry[name], folder, f"{path}, data set {name}")


def _described(entry: Mapping[str, Any]) -> DatasetEntry:
    name = entry.get("hf_hub_url") or entry.get("file_name")
    return _entry(str(name), dict(entry), Path(), "data.dataset")


def _entry(name: str, entry: Any, folder: Path, where: str) -> DatasetEntry:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping with file_name or hf_hub_url")
    for key in entry:
        check_known(key, KEYS, f"key of {where}")
    if entry.get("ranking"):
        raise ValueError(f"{where} is preference data (ranking); supervised fine-tuning takes alpaca or sharegpt rows")
    formatting = entry.get("formatting", "alpaca")
    check_known(formatting, COLUMNS, f"formatting of {where}")
    columns, tags = (_mapping(entry, key, where) for key in ("columns", "tags"))
    for column in columns:
        if column in OTHER_COLUMNS:
            raise ValueError(f"{where}: columns.{column} is for {OTHER_COLUMNS[column]}, which is not supported")
        check_known(column, COLUMNS[formatting], f"column of {formatting} data in {where}")
    for tag in tags:
        check_known(tag, TAGS, f"tag of {where}")
    return DatasetEntry(
        name=name,
        **_source(entry, folder, where),
        formatting=formatting,
        columns=REQUIRED_COLUMNS[formatting] | columns,
        optional_columns={} if "columns" in entry else OPTIONAL_COLUMNS[formatting],
        tags=TAGS | (OPENAI_TAGS if formatting == "openai" else {}) | tags,
        split=_text(entry, "split", where) or "train",
        num_samples=_num_samples(entry, where),
        image_folder=folder,
    )


def _source(entry: dict[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """Where the rows are: a hub name goes before a file, as in LLaMA-Factory."""
    hub_name, file_name = _text(entry, "hf_hub_url", where), _text(entry, "file_name", where)
    hub = {key: _text(entry, key, where) for key in ("subset", "folder", "revision")}
    if hub_name:
        return {"hub_name": hub_name, "file": None, **hub}
    if not file_name:
        raise ValueError(f"{where} has no file_name or hf_hub_url; other hubs and scripts are not supported")
    file = folder / file_name
    if not os.path.exists(file):  # False, not an error, for a name that no file can have
        raise ValueError(f"{where}: {file} does not exist")
    return {"hub_name": None, "file": file, **hub}


def _num_samples(entry: dict[str, Any], where: str) -> int | None:
    number = entry.get("num_samples")
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ValueError(f"{where}: num_samples must be a number of rows, got {number!r}")
    return number


def _text(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise ValueError(f"{where}: {key} must be text, got {value!r}")
    return value


def _mapping(entry: dict[str, Any], key: str, where: str) -> dict[str, str]:
    mapping = entry.get(key, {})
    if not isinstance(mapping, dict) or not all(isinstance(value, str) for value in mapping.values()):
        raise ValueError(f"{where}: {key} must map names to names, got {mapping!r}")
    return mapping
