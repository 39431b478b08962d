"""Rows of JSON and JSON Lines files, one at a time; a broken one is named with its line.

They are not read by `datasets`, whose JSON reader takes the types of all rows from the first ten megabytes: it refuses
a later row with another key (the first one with `tool_calls`, say) and turns a list that stands for a text into text.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 20  # bytes read at a time from an array


def read_json(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, or of lines that are each an object.

    Raises:
        ValueError: names file, row and line of what is not JSON, not UTF-8 or not an object; or there is no row.
    """
    row = 0
    for row, (line, value) in enumerate(_array(file) if _is_array(file) else _lines(file), start=1):
        if not isinstance(value, dict):
            shown = json.dumps(value)[:60]
            raise ValueError(f"{file}, row {row} (line {line}): a row must be a JSON object, got {shown}")
        yield value
    if not row:
        raise ValueError(f"{file} has no rows" if file.stat().st_size else f"{file} is empty")


def _is_array(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(3 if opened.read(3) == codecs.BOM_UTF8 else 0)
        while content := opened.read(CHUNK):
            if content.strip():
                return content.lstrip().startswith(b"[")
    return False


def _lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers and values of JSON Lines."""
    row = 0
    with file.open("rb") as opened:
        for number, content in enumerate(opened, start=1):
            if number == 1:
                content = content.removeprefix(codecs.BOM_UTF8)
            if content.strip():
                row += 1
                try:
                    yield number, json.loads(_text(content))
                except (ValueError, RecursionError) as error:
                    raise _broken(file, row, number, error) from error


def _text(content: bytes) -> str:
    return content.decode("utf-8")  # json.loads would guess UTF-16 from zero bytes


def _array(file: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers and values of the elements of a JSON array, which need not fit into memory."""
    with file.open("rb") as opened:
        text, row = _Window(opened), 0
        try:
            text.skip_space()
            text.take("[")
            while text.skip_space() != "]":
                yield text.line, text.value()
                row += 1
                if text.skip_space() == ",":
                    text.take(",")
                elif text.skip_space() != "]":
                    raise ValueError("expected , or ]")
            text.take("]")
            if text.skip_space():
                raise ValueError("text after the end of the array")
        except (ValueError, RecursionError) as error:
            raise _broken(file, row + 1, text.line, error, text.column) from error


class _Window:
    """The text of an open file from the place that was read up to; more is read when it is needed."""

    def __init__(self, opened: Any) -> None:
        self._file, self._chunk = opened, CHUNK
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._json = json.JSONDecoder()
        self._text, self._position, self._ended = "", 0, False
        self.line, self.column = 1, 1

    def skip_space(self) -> str:
        """Go to the next character that is not white space, and return it; empty at the end."""
        while True:
            start = self._position
            while self._text[self._position : self._position + 1].isspace():
                self._position += 1
            self._count(self._text[start : self._position])
            if self._position < len(self._text) or not self._more():
                return self._text[self._position : self._position + 1]

    def take(self, character: str) -> None:
        """Go on after `character`, which is the next one."""
        if self.skip_space() != character:
            raise ValueError(f"expected {character}")
        self._position += 1
        self._count(character)

    def value(self) -> Any:
        """The JSON value that begins here."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._position)
                if end < len(self._text) or not self._more():  # a number may go on in the next chunk
                    break
            except json.JSONDecodeError as error:
                if not self._more():
                    self._count(self._text[self._position : error.pos])
                    raise ValueError(error.msg) from error
        self._count(self._text[self._position : end])
        self._position = end
        return value

    def _more(self) -> bool:
        """Read a chunk, each twice as long as the last one for the same value; False at the end of the file."""
        if self._ended:
            return False
        grown = self._position == 0 and bool(self._text)
        self._chunk = 2 * self._chunk if grown else CHUNK
        content = self._file.read(self._chunk)
        self._ended = not content
        try:
            decoded = self._decode(content, final=self._ended)
        except UnicodeDecodeError as error:
            self.line += self._text.count("\n", self._position) + error.object.count(b"\n", 0, error.start)
            raise
        self._text = self._text[self._position :] + decoded
        self._position = 0
        return True

    def _count(self, passed: str) -> None:
        newlines = passed.count("\n")
        self.line += newlines
        self.column = len(passed) - passed.rfind("\n") if newlines else self.column + len(passed)


def _broken(file: Path, row: int, line: int, error: Exception, column: int | None = None) -> ValueError:
    if isinstance(error, UnicodeDecodeError):
        return ValueError(f"{file}, line {line}: not UTF-8: {error.reason}")
    if isinstance(error, RecursionError):
        return ValueError(f"{file}, row {row} (line {line}): nested too deeply")
    column = getattr(error, "colno", column)
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    place = f"line {line}" if column is None else f"line {line}, column {column}"
    return ValueError(f"{file}, row {row} ({place}): not JSON: {reason}")
