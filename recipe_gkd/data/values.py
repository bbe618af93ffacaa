"""Columns and their values: parse JSON, walk through objects, and mark what cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character that UTF-16 writes in two halves. It is no character, and no file or tokenizer accepts it."""
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


MAX_LEVELS, MAX_ROW_LEVELS = 100, 400
"""Largest number of nested levels of a value that is read, and of a row that is parsed."""


ColumnPath = tuple[str, ...]
"""Name of a column, followed by the names of nested fields."""


@dataclass(frozen=True, kw_only=True)
class RowColumns:
    """Columns that the parts of a row come from.

    Attributes:
        names: All columns of the data set.
        prompt: Column of the prompt.
        response: Column of the reference response.
        tools: Path of the tools. None: rows have no tools.
        default_tools: Tools of rows that have none.
        truth: Path of the ground truth. None: the data has none.
        data_source: Column of the name of the data source.
    """

    names: Sequence[str]
    prompt: str
    response: str
    tools: ColumnPath | None
    default_tools: list[dict[str, Any]] | None
    truth: ColumnPath | None
    data_source: str


@dataclass(frozen=True)
class Unreadable:
    """Value of a column that cannot become a Python object, such as a year after 9999. It matters if it is read."""

    reason: str


def parse_json(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        ValueError: The text is no JSON, or has more nested levels than Python can parse.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"it has more than {MAX_ROW_LEVELS} nested levels") from None


def is_list_of_objects(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return True for a list of JSON objects, which may be empty."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def count_levels(value: object) -> int:
    """Return the number of nested levels of lists and objects, plus one."""
    n_levels, layer = 0, [value]
    while layer:
        n_levels += 1
        layer = [
            child
            for each in layer
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return n_levels


def without_nulls(value: object) -> Any:
    """Return a value without null fields, because a column gives every object the fields of all others."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def may_have_surrogates(line: bytes | bytearray) -> bool:
    """Return True if a JSON text may have halves of characters, which pairs of escapes also look like."""
    return _ESCAPED_SURROGATE.search(line) is not None


def replace_surrogates(value: object) -> Any:
    """Return a value with U+FFFD, the replacement character, instead of each half of a character."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {replace_surrogates(name): replace_surrogates(field) for name, field in value.items()}
    return [replace_surrogates(each) for each in value] if isinstance(value, list) else value


def nested_value(value: object, path: Sequence[str]) -> object:
    """Return the value of a nested field. None if an object does not have the field."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
