"""Fields of the schema: :func:`key` describes a key and its range, :func:`timeout` a deadline."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from recipe_gkd.config.limits import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from recipe_gkd.config.schema.unused import UnusedWhen

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def key(doc: str, unused: Sequence[UnusedWhen] = (), refused: Sequence[UnusedWhen] = (), **bounds: Any) -> Any:
    """Return a field of the schema.

    Args:
        doc: Description.
        unused: Conditions under which nothing reads the key. If the user sets it, the first one is a warning.
        refused: Such conditions under which another value than the default is an error.
        bounds: pydantic's ``ge``, ``gt``, ``le`` and ``lt``.
    """
    return dataclasses.field(
        default=Field(description=doc, **bounds), metadata={"unused": tuple(unused), "refused": refused}
    )


def timeout(doc: str, longest_s: float = MAX_TIMEOUT_S, unused: Sequence[UnusedWhen] = ()) -> Any:
    """Return a field for a deadline in seconds. ``doc`` continues the words "Timeout of"."""
    return key(f"Timeout of {doc}", unused, ge=MIN_TIMEOUT_S, le=longest_s)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else null_to_list(value)


def null_to_list(value: Any) -> Any:
    """Return an empty list for null, which other projects write for it."""
    return [] if value is None else value


def expand_home(value: str) -> str:
    """Return a path with the home folder in place of ``~`` or ``~user``. Paths separated by commas are expanded too."""
    return re.sub(r"(?:^|(?<=,))(\s*)(~[^,]*)", lambda match: match[1] + os.path.expanduser(match[2]), value)


def not_empty(value: str) -> str:
    """Return a text that is not empty. An empty one, such as of an unset variable, would mean another folder."""
    if not value.strip():
        raise ValueError("input should not be empty; is a variable unset?")
    return value


class PathUse(Enum):
    """Use of a path. It decides which relative paths of the command line belong to the caller's folder."""

    INPUT = auto()
    """A file or folder that exists, or a name, such as the name of a hub model."""
    DATA = auto()
    """Files or folders that exist, which may be separated by commas."""
    OUTPUT = auto()
    """A file or folder that may be created."""
    SOURCE = auto()
    """``FILE.py`` or ``FILE.py:Name``, or the name of something built in."""


UserPath = Annotated[str, AfterValidator(expand_home), PathUse.INPUT]
"""Path. Configurations are the only place where ``~`` is expanded, besides commands' arguments."""
OutputPath = Annotated[str, AfterValidator(not_empty), AfterValidator(expand_home), PathUse.OUTPUT]
Name = Annotated[str, AfterValidator(not_empty)]
SourcePath = Annotated[str, AfterValidator(expand_home), PathUse.SOURCE]
DataPath = Annotated[str, AfterValidator(expand_home), PathUse.DATA]
Files = Annotated[list[DataPath], BeforeValidator(_as_list)]
"""Paths. A single string is accepted as a list of one."""
