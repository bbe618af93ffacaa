"""Names of the metrics that docs/metrics.md describes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests._support.repository import REPO

_NAME = re.compile(r"[a-z_]+(/[\w{},@]+)+")


def documented_names() -> list[str]:
    """Return all names, with placeholders in capitals: ``actor/kl_loss_at/N``.

    A cell of a table shortens names that follow: ``timing/sync``, ``_begin`` and ``reward/mean``, ``std``.
    """
    text = (REPO / "docs/metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    names = [name for cell in cells for name in _names_of(cell)]
    return sorted({*names, *(token for token in re.findall(r"`([^`]+)`", text) if _NAME.fullmatch(token))})


def is_documented(name: str) -> bool:
    """Return True if ``name`` is one of the documented metrics, with values in the place of placeholders.

    Metrics of custom losses, which have any name, do not count.
    """
    names = [documented for documented in documented_names() if documented != "actor/NAME"]
    return any(_pattern(documented).fullmatch(name) for documented in names)


def _names_of(cell: str) -> Iterator[str]:
    first = ""
    for token in re.findall(r"`([^`]+)`", cell):
        if "/" in token:
            first = token
            yield from _expand(token)
        elif first:
            yield first + token if token.startswith("_") else f"{first.rpartition('/')[0]}/{token}"


def _expand(name: str) -> list[str]:
    """Return the names of ``a/{b,c}``."""
    match = re.fullmatch(r"(.*)\{(.*)\}", name)
    return [match[1] + part for part in match[2].split(",")] if match else [name]


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"([A-Z]+|@n)", name)
    return re.compile("".join(_part(part) for part in parts))


def _part(part: str) -> str:
    if part == "@n":
        return r"@\d+"
    if part == "N":
        return r"\d+"
    if part == "SOURCE":  # from the data, with slashes
        return ".+"
    return "[^/]+" if part.isupper() else re.escape(part)
