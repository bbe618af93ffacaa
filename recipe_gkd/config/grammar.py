"""Hydra's grammar of overrides: quotes, lists, and the error for text that Hydra cannot parse."""

from __future__ import annotations

import re
import shlex
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from recipe_gkd.errors import ConfigError

ValueKind = Literal["list", "scalar", "unknown"]
"""Type of a key's value. It is unknown for a key that users named, and for a section."""
_HOME_PATH = re.compile(r"""(?:^|(?<=[\[,\s:]))(~[^,\[\]{}'"]*)""")
"""A value or an element of a list that starts with ``~``. Hydra has no such token; a shell expands none after ``=``."""
_ELEMENT = re.compile(r"""\s*((?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\[[^\]]*\]|\{[^}]*\}|[^,])*)(?:,|$)""")
"""An element of a list or mapping. Commas within quotes, brackets and braces separate none."""


def parse(text: str) -> tuple[str, Override]:
    """Parse an override. Return the text that Hydra accepts, in which values that start with ``~`` are quoted.

    Raises:
        HydraException: The override cannot be parsed.
    """
    parser = OverridesParser.create()
    try:
        return text, parser.parse_override(text)
    except HydraException:
        key, separator, value = text.partition("=")
        quoted = key + separator + _HOME_PATH.sub(r"'\1'", value)
        if quoted == text:
            raise
        return quoted, parser.parse_override(quoted)


def quote(text: str) -> str:
    """Return ``text`` in quotes, so that Hydra reads it as one string, with all its characters."""
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'")
    return f"'{escaped}'"


def to_text(value: Any) -> str:
    """Return a value of an override as text of Hydra's grammar, in which each string is quoted."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list):
        return f"[{','.join(map(to_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{to_text(item)}' for name, item in value.items())}}}"
    return "null" if value is None else str(value).lower()


def grammar_error(text: str, reason: str, kind: ValueKind = "unknown") -> ConfigError:
    """Return the error for an override that Hydra cannot parse, with forms of it that can be parsed.

    Args:
        text: The override.
        reason: Hydra's reason.
        kind: Type of the key's value.
    """
    key, separator, value = text.partition("=")
    keys = (key.lstrip("+"),)
    one = quote(value) if kind != "list" else f"[{quote(value)}]"
    several = None
    if kind != "scalar" and value.startswith(("[", "{")):
        one = _quote_parts(value)
    elif kind == "list" and "," in value:
        several = _quote_parts(f"[{value}]")
    if not separator or not _can_parse(f"{key}={one}"):
        return ConfigError(f"the override {text!r} is not of the form key=value: {reason}", keys=keys)
    remedy = f"quote the value for Hydra and the whole for the shell: {shlex.quote(f'{key}={one}')}"
    if several is not None and _can_parse(f"{key}={several}"):
        remedy = (
            f"write several values as a list: {shlex.quote(f'{key}={several}')}; for one value with commas, {remedy}"
        )
    return ConfigError(
        f"the override {text!r} cannot be parsed, because its value has a character with a meaning for Hydra "
        f"({reason})",
        remedy=remedy,
        keys=keys,
    )


def _quote_parts(value: str) -> str:
    """Return a value in which the elements of lists and mappings that Hydra cannot parse are quoted."""
    value = value.strip()
    if _can_parse(f"key={value}"):
        return value
    inner = value[1:-1]
    if value.startswith("[") and value.endswith("]"):
        return f"[{','.join(_quote_parts(part) for part in _ELEMENT.findall(inner) if part)}]"
    if value.startswith("{") and value.endswith("}"):
        entries = [part.partition(":") for part in _ELEMENT.findall(inner) if part]
        return f"{{{','.join(f'{name.strip()}:{_quote_parts(part)}' for name, _, part in entries)}}}"
    return quote(value)


def _can_parse(text: str) -> bool:
    try:
        return not parse(text)[1].is_sweep_override()
    except HydraException:
        return False
