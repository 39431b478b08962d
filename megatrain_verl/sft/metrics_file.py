"""The metrics file of a run that is resumed: verl's `file` logger empties it at each start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

VARIABLE = "VERL_FILE_LOGGER_PATH"


@contextmanager
def continued(path: Path, step: int) -> Iterator[None]:
    """Keep the lines of `path` up to `step`, the one that the run goes on from, before those that are written inside.

    They wait in a second file, which a killed run leaves behind and the next one takes into account.
    """
    earlier = path.with_name(f"{path.name}.earlier")
    kept = _until(step, earlier, path)
    if kept:
        _replace(earlier, kept)
        path.unlink(missing_ok=True)
    else:
        earlier.unlink(missing_ok=True)
    try:
        yield
    finally:
        if kept:
            _replace(path, kept + (path.read_bytes().splitlines(keepends=True) if path.exists() else []))
            earlier.unlink()


def trim(path: Path, step: int) -> None:
    """Drop the lines of `path` beyond `step`, the one that the run goes on from, and half a line."""
    if path.exists():
        _replace(path, _until(step, path))


def _until(step: int, *files: Path) -> list[bytes]:
    """Complete lines of `files` up to `step`; of several for one step and kind, the last."""
    lines: dict[tuple, bytes] = {}
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else [], start=1):
            if line.endswith(b"\n"):
                lines[_key(line, f"{file}, line {number}")] = line
    return [line for key, line in sorted(lines.items(), key=lambda item: item[0][0]) if key[0] <= step]


def _key(line: bytes, where: str) -> tuple:
    try:
        entry = orjson.loads(line)
        return int(entry["step"]), *sorted(entry["data"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{where} is not what a run wrote ({error!r}); move the file away") from error


def _replace(path: Path, lines: list[bytes]) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(b"".join(lines))
    os.replace(new, path)
