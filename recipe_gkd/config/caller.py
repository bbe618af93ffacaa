"""Relative paths of the command line: they belong to the caller's folder, even if a launch script changes the folder.

The scripts of ``launch/`` change to the repository, and export the caller's folder. Paths in YAML files stay as they
are written.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from hydra.errors import HydraException

from recipe_gkd.config.grammar import parse, quote, to_text
from recipe_gkd.config.key_types import is_union, plain_type
from recipe_gkd.config.schema import Config
from recipe_gkd.config.schema.fields import PathUse

VARIABLE = "GKD_CALLER_DIR"
"""Environment variable with the caller's folder. Unset: the current folder."""


def caller_path(text: str) -> Path:
    """Return a path of the command line, in which ``~`` is the home folder, as one of the caller's folder."""
    return _folder() / Path(text).expanduser()


def resolve_override(text: str) -> str:
    """Return an override in which the relative paths of the caller's folder are absolute.

    Input files that the caller's folder does not have stay as they are, such as the name of a hub model. A path with
    characters that have a meaning for Hydra needs no quotes if it exists.

    Args:
        text: Override of a key of this project.
    """
    key, _, value = text.partition("=")
    hint = _hint_of(key.lstrip("+"))
    if hint is None or not value:
        return text
    if _use_of(hint) is not None and _needs_quotes(text) and (_folder() / value).exists():
        return f"{key}={quote(_literal(_folder() / value))}"
    if VARIABLE not in os.environ:
        return text
    try:
        _, override = parse(text)
    except HydraException:
        return text
    if override.is_delete() or override.is_sweep_override():
        return text
    found = override.value()
    resolved = _resolve(found, hint)
    return text if resolved == found else f"{key}={to_text(resolved)}"


def _folder() -> Path:
    return Path(os.environ.get(VARIABLE, ""))


def _needs_quotes(text: str) -> bool:
    """Return True if Hydra cannot parse an override, or its value is none that was written in quotes or brackets."""
    if text.partition("=")[2].startswith(("'", '"', "[", "{")):
        return False
    try:
        return "${" in text or parse(text)[1].is_sweep_override()
    except HydraException:
        return True


def _hint_of(name: str) -> Any:
    """Return the type of the key ``name``, also of an entry of a mapping. None if the schema has no such key."""
    hint: Any = Config
    for part in name.split("."):
        hint = plain_type(hint)
        if get_origin(hint) is dict:
            hint = get_args(hint)[1]
        elif dataclasses.is_dataclass(hint):
            hint = get_type_hints(hint, include_extras=True).get(part)
        else:
            return None
    return hint


def _use_of(hint: Any) -> PathUse | None:
    """Return the use of a path in a text of this type. None if it is no path."""
    if get_origin(hint) is Annotated:
        marks = [mark for mark in hint.__metadata__ if isinstance(mark, PathUse)]
        return marks[0] if marks else _use_of(hint.__origin__)
    inner = get_args(hint) if is_union(hint) or get_origin(hint) is list else ()
    return next((use for part in inner if (use := _use_of(part)) is not None), None)


def _resolve(value: Any, hint: Any) -> Any:
    """Return a value with absolute paths, also in lists and mappings."""
    plain = plain_type(hint)
    if isinstance(value, str):
        use = _use_of(hint)
        return value if use is None else _absolute(value, use)
    if isinstance(value, list) and get_origin(plain) is list:
        return [_resolve(item, hint) for item in value]
    if isinstance(value, dict) and get_origin(plain) is dict:
        return {name: _resolve(item, get_args(plain)[1]) for name, item in value.items()}
    if isinstance(value, dict) and dataclasses.is_dataclass(plain):
        hints = get_type_hints(plain, include_extras=True)
        return {name: _resolve(item, hints.get(name)) for name, item in value.items()}
    return value


def _absolute(value: str, use: PathUse) -> str:
    if not value or value.startswith(("~", "/", "${")):
        return value
    file, name = value.replace("\\${", "${"), ""
    if use is PathUse.SOURCE:  # FILE.py:Name, where a text without a colon is the name of something built in, or a file
        file, colon, name = file.rpartition(":") if ":" in file else (file, "", "")
        if not file.endswith(".py"):
            return value
        name = colon + name
    path = _folder() / file
    if path.exists():
        return _literal(path) + name
    if use is PathUse.DATA and "," in value:  # a list of paths
        return ",".join(_absolute(part.strip(), use) for part in value.split(","))
    return f"{_literal(_folder())}/{value}" if use is PathUse.OUTPUT else value


def _literal(path: Path) -> str:
    """Return a path as a value in which ``${`` is text and no interpolation."""
    return str(path).replace("${", "\\${")
