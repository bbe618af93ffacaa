"""Tools of a row (``data.tools_key``), which chat templates describe to the model."""

from __future__ import annotations

from typing import Any

from recipe_gkd.data.values import is_list_of_objects, parse_json, without_nulls
from recipe_gkd.errors import DataError

Tools = list[dict[str, Any]]
"""JSON schemas of functions, as a chat template expects them."""


def read_tools(value: object, where: str, key: str, *, drop_nulls: bool) -> Tools | None:
    """Return the tools of a row, None without any.

    Args:
        value: List of objects, or its JSON text.
        where: Row of the tools, for error messages.
        key: Column of the tools.
        drop_nulls: Drop null fields, because the format of the file adds them. Nulls in JSON text are the user's.

    Raises:
        DataError: The value is not a list of objects, or its JSON text.
    """
    tools = value
    if isinstance(value, str):
        try:
            tools = parse_json(value) if value.strip() else None
        except ValueError as error:
            what = f"{where}: the tools in column {key} are no JSON: {error}; got {value!r:.200}"
            raise DataError(what, column=key) from error
    if tools is None or tools == []:
        return None
    if not is_list_of_objects(tools):
        raise DataError(
            f"{where}: the tools in column {key} are {value!r:.200}; expected a list of objects such as "
            "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}, or its JSON text",
            column=key,
        )
    found: Tools = without_nulls(tools) if drop_nulls and not isinstance(value, str) else tools
    return found
