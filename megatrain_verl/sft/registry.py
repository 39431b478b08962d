"""`dataset_info.json`, LLaMA-Factory's registry of data sets: a file, its format, and how its columns are called."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGISTRY = "dataset_info.json"
KEYS = ("file_name", "formatting", "columns", "tags")
COLUMNS = {
    "alpaca": ("prompt", "query", "response", "history", "system", "tools"),
    "sharegpt": ("messages", "system", "tools"),
}
REQUIRED_COLUMNS = {
    "alpaca": {"prompt": "instruction", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
OPTIONAL_COLUMNS = {"alpaca": {"query": "input"}, "sharegpt": {}}  # of an entry that maps no columns
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True)
class DatasetEntry:
    """One data set: `columns` maps the format's names to the file's, `tags` the names inside a sharegpt message.

    `optional_columns` are read where the file has them.
    """

    name: str
    file: Path
    formatting: str
    columns: dict[str, str]
    optional_columns: dict[str, str]
    tags: dict[str, str]


def find_datasets(names: list[str], folder: Path) -> list[DatasetEntry]:
    """The entries `names` of `folder`/dataset_info.json, whose files lie in `folder`.

    Raises:
        ValueError: no or a broken registry, an unknown name, a key or column that is not supported, no such file.
    """
    path = folder / REGISTRY
    if not path.is_file():
        raise ValueError(f"data.dataset_dir={folder} has no {REGISTRY}, which says what the data sets there are")
    try:
        registry = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(registry, dict):
        raise ValueError(f"{path} must map names of data sets to their descriptions")
    return [_entry(name, registry, path) for name in names]


def _entry(name: str, registry: dict[str, Any], path: Path) -> DatasetEntry:
    _known(name, registry, f"data set in {path}")
    where, entry = f"{path}, data set {name}", registry[name]
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping with file_name")
    for key in entry:
        _known(key, KEYS, f"key of {where}")
    if not isinstance(entry.get("file_name"), str):
        raise ValueError(f"{where} has no file_name; data on a hub must be downloaded first")
    file = path.parent / entry["file_name"]
    if not file.is_file():
        raise ValueError(f"{where}: {file} does not exist")
    formatting = entry.get("formatting", "alpaca")
    _known(formatting, COLUMNS, f"formatting of {where}")
    columns, tags = (_mapping(entry, key, where) for key in ("columns", "tags"))
    for column in columns:
        _known(column, COLUMNS[formatting], f"column of {formatting} data in {where}")
    for tag in tags:
        _known(tag, TAGS, f"tag of {where}")
    optional = {} if "columns" in entry else OPTIONAL_COLUMNS[formatting]
    return DatasetEntry(name, file, formatting, REQUIRED_COLUMNS[formatting] | columns, optional, TAGS | tags)


def _mapping(entry: dict[str, Any], key: str, where: str) -> dict[str, str]:
    mapping = entry.get(key, {})
    if not isinstance(mapping, dict) or not all(isinstance(value, str) for value in mapping.values()):
        raise ValueError(f"{where}: {key} must map names to names, got {mapping!r}")
    return mapping


def _known(name: str, known: Any, kind: str) -> None:
    if name in known:
        return
    nearest = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(sorted(known))}"
    raise ValueError(f"{name!r} is not a {kind}; {hint}")
