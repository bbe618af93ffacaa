"""Tools of each row (``data.tools_key``), which chat templates describe to the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.tables import column_at, column_path
from recipe_gkd.errors import DataError

Tools = list[dict[str, Any]]
"""JSON schemas of functions, as a chat template expects them."""


def read_tools(table: pa.Table, config: DataConfig, name: str) -> Sequence[Tools | None]:
    """Return the tools of each row. None for rows without tools, and for all rows without ``data.tools_key``.

    Args:
        table: Data set.
        config: Settings of the data.
        name: Name of the data set, for messages.

    Raises:
        DataError: The column is missing, or a value is not a list of objects, or its JSON text.
    """
    if config.tools_key is None:
        return [None] * table.num_rows
    path = column_path(table, config.tools_key, setting="data.tools_key", purpose="with the tools of each prompt")
    values = column_at(table, path).to_pylist()
    return [_tools_of(value, f"row {row} of {name}", config.tools_key) for row, value in enumerate(values)]


def _tools_of(value: Any, where: str, key: str) -> Tools | None:
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise DataError(f"{where}: the tools in column {key} are no JSON: {error}; got {value!r:.200}") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: the tools in column {key} are {value!r:.200}; expected a list of objects such as "
            "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}, or its JSON text"
        )
    return tools if isinstance(value, str) else [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields, because a column gives every object the fields of all others."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
