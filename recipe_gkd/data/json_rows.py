"""Rows of jsonl and json files. Each stays the text that the file has, until it is read."""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from recipe_gkd.data.values import (
    MAX_LEVELS,
    MAX_ROW_LEVELS,
    Unreadable,
    count_levels,
    may_have_surrogates,
    nested_value,
    parse_json,
    replace_surrogates,
)
from recipe_gkd.errors import DataError

log = logging.getLogger(__name__)

EXPECTED = "expected a list of objects, or one object per line"
_NEWLINE = b"\n"
_TYPE_NAMES = {str: "text", int: "int", float: "float", bool: "bool", list: "list", dict: "object"}


class JsonRows:
    """Rows of a JSON list of objects, or of one object per line. Each row stays the text that the file has."""

    adds_nulls = False

    def __init__(self, path: Path, content: bytes) -> None:
        """Check every row.

        Raises:
            DataError: A row is no JSON object. It has the line, or in a JSON list the row.
        """
        self.path, self._is_list = path, False
        content = content.removeprefix(b"\xef\xbb\xbf")
        self._content: bytes | bytearray = content
        spans = _lines(content)
        if content.lstrip().startswith(b"["):
            self._is_list = True
            self._content, spans = _elements(path, content)
        self._spans = np.frombuffer(spans, np.int64).reshape(-1, 3) if spans else np.zeros((0, 3), np.int64)
        self._types: dict[str, Counter[type]] = {}
        self._repaired: set[int] = set()
        for index in range(len(self)):
            self._check(index)
        self.columns = list(self._types)
        if self._repaired:
            log.warning(
                "%s: %d rows have halves of surrogate pairs, which are no characters and become U+FFFD, or values with "
                "more than %d levels, which are not read; the first is %s",
                path,
                len(self._repaired),
                MAX_LEVELS,
                self.place(min(self._repaired)),
            )

    def _check(self, index: int) -> None:
        """Note the types of a row, and if it needs a repair."""
        try:
            text = self._line(index).decode()
            row = parse_json(text)
        except json.JSONDecodeError as error:
            what = f"{self.place(index)}, column {error.colno}: {error.msg}; {EXPECTED}"
            raise self._error(index, what, "correct or remove the line") from error
        except ValueError as error:  # also UnicodeDecodeError
            raise self._error(index, f"{self.place(index)}: {error}", "correct or remove the row") from error
        line = self._line(index)
        may_be_deep = line.count(b"[") + line.count(b"{") > MAX_LEVELS
        if may_be_deep and count_levels(row) > MAX_ROW_LEVELS:
            what = f"{self.place(index)}: it has more than {MAX_ROW_LEVELS} nested levels"
            raise self._error(index, what, "correct or remove the row")
        if not isinstance(row, dict):
            raise self._error(index, f"{self.place(index)} is {row!r:.100}; {EXPECTED}", "")
        for name, value in row.items():
            self._types.setdefault(name, Counter())[type(value)] += 1
        if (may_be_deep or may_have_surrogates(line)) and _repair(row) != row:
            self._repaired.add(index)

    def _error(self, index: int, what: str, remedy: str) -> DataError:
        row = index if self._is_list else None
        return DataError(
            f"data file {self.path}: {what}", remedy=remedy, file=self.path, row=row, line=self.line(index)
        )

    def _line(self, index: int) -> bytes | bytearray:
        return self._content[self._spans[index, 0] : self._spans[index, 1]]

    def __len__(self) -> int:
        return len(self._spans)

    def values(self, index: int) -> Mapping[str, object]:
        """Return the values of a row by column; see :class:`recipe_gkd.data.files.StoredRows`."""
        row: dict[str, object] = json.loads(self._line(index))
        return _repair(row) if index in self._repaired else row

    def place(self, index: int) -> str:
        """Return the place of a row in the file."""
        return f"row {index}" if self._is_list else f"line {self.line(index)}"

    def line(self, index: int) -> int | None:
        """Return the number of a row's line, starting at 1. None for a JSON list."""
        return None if self._is_list else int(self._spans[index, 2])

    def fields(self, path: Sequence[str]) -> list[str]:
        """Return the names of the fields of the objects at ``path``."""
        return list(dict.fromkeys(name for value in self._values_at(path) if isinstance(value, dict) for name in value))

    def has_field(self, path: Sequence[str]) -> bool:
        """Return True if there is a nested field at ``path``."""
        return any(isinstance(value, dict) and path[-1] in value for value in self._values_at(path[:-1]))

    def _values_at(self, path: Sequence[str]) -> Iterator[object]:
        return (nested_value(self.values(index), path) for index in range(len(self)))

    def describe(self, column: str) -> tuple[str, int]:
        """Return the type of a column, and its number of nulls."""
        types = self._types[column]
        n_null = len(self) - types.total() + types[type(None)]
        return " or ".join(_TYPE_NAMES[each] for each in types if each is not type(None)) or "null", n_null


def _repair(row: dict[str, object]) -> dict[str, object]:
    """Return a row without halves of characters, and without values that recursive functions cannot walk through."""
    too_deep = Unreadable(f"it has more than {MAX_LEVELS} nested levels")
    return {
        replace_surrogates(name): too_deep if count_levels(value) > MAX_LEVELS else replace_surrogates(value)
        for name, value in row.items()
    }


def _lines(content: bytes) -> array[int]:
    """Return start, end and number of each line that is not empty, one after the other."""
    spans, start, number = array("q"), 0, 1
    while start < len(content):
        end = content.find(_NEWLINE, start)
        end = len(content) if end < 0 else end
        if content[start:end].strip():
            spans.extend((start, end, number))
        start, number = end + 1, number + 1
    return spans


def _elements(path: Path, content: bytes) -> tuple[bytearray, array[int]]:
    """Return the elements of a JSON list as bytes, and start, end and 0 of each. One is parsed at a time."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = 1 + content.count(_NEWLINE, 0, error.start)
        what = f"data file {path}: line {line}: {error}"
        raise DataError(what, remedy="save the file as UTF-8", file=path, line=line) from error
    decoder, joined, spans = json.JSONDecoder(), bytearray(), array("q")

    def skip_spaces(position: int) -> int:
        while text[position : position + 1].isspace():
            position += 1
        return position

    position = skip_spaces(skip_spaces(0) + 1)
    is_end = text[position : position + 1] == "]"
    try:
        while not is_end:
            start = position
            _, position = decoder.raw_decode(text, position)
            part = text[start:position].encode()
            spans.extend((len(joined), len(joined) + len(part), 0))
            joined += part
            position = skip_spaces(position)
            is_end = text[position : position + 1] == "]"
            if not is_end and text[position : position + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, position)
            position = position if is_end else skip_spaces(position + 1)
        if skip_spaces(position + 1) < len(text):
            raise json.JSONDecodeError("Extra data", text, position + 1)
    except RecursionError:
        row = len(spans) // 3
        what = f"data file {path}: row {row}: it has more than {MAX_ROW_LEVELS} nested levels"
        raise DataError(what, remedy="correct or remove the row", file=path, row=row) from None
    except json.JSONDecodeError as error:
        row = len(spans) // 3
        what = f"data file {path}: line {error.lineno}, column {error.colno} (row {row}): {error.msg}; {EXPECTED}"
        raise DataError(what, remedy="correct the file", file=path, row=row, line=error.lineno) from error
    return joined, spans
