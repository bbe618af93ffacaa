"""Keys of the schema and their types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from recipe_gkd.config.schema import Config


@cache
def known_keys(section: type = Config, prefix: str = "") -> Mapping[str, dataclasses.Field[Any]]:
    """Return the schema field of every key by its dotted name.

    Args:
        section: Dataclass of the schema to start from.
        prefix: Dotted name of ``section``, with a trailing dot, or empty.
    """
    hints = get_type_hints(section)
    keys: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(section):
        name = prefix + field.name
        if dataclasses.is_dataclass(kind := hints[field.name]):
            assert isinstance(kind, type)
            keys |= known_keys(kind, name + ".")
        else:
            keys[name] = field
    return keys


@cache
def keys_of_type(kind: type) -> tuple[str, ...]:
    """Return the names of the keys whose value is a ``list``, or a ``dict`` in which users choose the names."""
    return tuple(name for name in known_keys() if get_origin(plain_type(type_of(name))) is kind)


def description(field: dataclasses.Field[Any]) -> str:
    """Return the description of a key."""
    info: Any = field.default  # pydantic keeps a field's Field(...) there
    return str(info.description)


def type_of(name: str) -> Any:
    """Return the type of the key ``name`` in the schema, with its annotations."""
    hint: Any = Config
    for part in name.split("."):
        hint = _annotated_types(hint)[part]
    return hint


@cache
def _annotated_types(section: type) -> Mapping[str, Any]:
    return get_type_hints(section, include_extras=True)


def is_union(hint: Any) -> bool:
    """Return True for a type of several, such as one with None."""
    return get_origin(hint) in (Union, UnionType)


def plain_type(hint: Any) -> Any:
    """Return a type without its annotations, and without None."""
    if get_origin(hint) is Annotated:
        return plain_type(hint.__origin__)
    if is_union(hint):
        return plain_type(next(part for part in get_args(hint) if part is not NoneType))
    return hint


def accepts_null(hint: Any) -> bool:
    """Return True if None is a value of a type."""
    if get_origin(hint) is Annotated:
        return accepts_null(hint.__origin__)
    return is_union(hint) and NoneType in get_args(hint)
