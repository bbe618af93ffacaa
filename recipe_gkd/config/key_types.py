"""Types of the keys in the schema."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from recipe_gkd.config.schema import Config


def type_of(name: str) -> Any:
    """Return the type of the key ``name`` in the schema, with its annotations."""
    hint: Any = Config
    for part in name.split("."):
        hint = get_type_hints(hint, include_extras=True)[part]
    return hint


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
