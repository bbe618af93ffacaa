"""Answers to unknown keys: keys of other projects, and known keys with a similar name.

:mod:`~recipe_gkd.config.foreign_keys` has the table of the other projects' keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from recipe_gkd.config.foreign_keys import PROJECTS, ForeignKey

MIN_SIMILARITY = 0.85
MAX_EDITS = 2
"""Names with at most this many edits are similar too, if at most a third of the letters differ."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Match of a key with the table of other projects' keys.

    Attributes:
        name: The key that was found.
        project: Name of the other project.
        entry: Row of the table.
    """

    name: str
    project: str
    entry: ForeignKey

    @property
    def key(self) -> str | None:
        """Our key with the same meaning and unit, None if a value cannot be taken over."""
        return self.entry.key

    def warning(self, value: str) -> str:
        """Return the warning for an accepted override with this value."""
        advice = f" ({self.entry.advice})" if self.entry.advice else ""
        return f"{self.name} is a key of {self.project} and is read as {self.key}={value}{advice}; write {self.key}"

    def refusal(self) -> str:
        """Return what to write instead."""
        if self.key is not None:
            return f"unknown key {self.name}: it is a key of {self.project}; write {self.key}"
        return f"unknown key {self.name}: it is a key of {self.project}; {self.entry.advice}"


def find_alias(name: str) -> Alias | None:
    """Return the row of a key of another project. Complete names take precedence over patterns.

    Args:
        name: Dotted name of a key.
    """
    matches = [
        (any("*" in pattern for pattern in found), Alias(name=name, project=project.name, entry=entry))
        for project in PROJECTS
        for entry in project.keys
        if (found := [pattern for pattern in entry.names if fnmatchcase(name, pattern)])
    ]
    return min(matches, key=lambda match: match[0])[1] if matches else None


def unknown_key_message(name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown key.

    Args:
        name: Dotted name of the unknown key.
        known: All known keys.
    """
    known = list(known)
    if alias := find_alias(name):
        return alias.refusal()
    if suggestion := _suggestion(name, known):
        return f"unknown key {name}: did you mean {suggestion}?"
    section = name.rpartition(".")[0]
    while section and not any(key.startswith(f"{section}.") for key in known):
        section = section.rpartition(".")[0]
    if section:
        return f"unknown key {name}: `python -m recipe_gkd.config {section}` lists the keys of the section {section}"
    return f"unknown key {name}: `python -m recipe_gkd.config` lists the keys"


def _suggestion(name: str, known: list[str]) -> str | None:
    """Return the known key with a similar name in the same section, else with the same or a similar last name."""
    section, _, last = name.rpartition(".")
    by_last = {key: key.rpartition(".")[2] for key in known}
    groups = (
        [key for key, other in by_last.items() if key == f"{section}.{other}" and _is_similar(last, other)],
        [key for key, other in by_last.items() if other == last and "_" in last],  # `path` and `n` are no hints
        [key for key, other in by_last.items() if _is_similar(last, other)],
    )
    candidates = next((group for group in groups if group), [])
    return max(candidates, key=lambda key: difflib.SequenceMatcher(None, name, key).ratio(), default=None)


def _is_similar(name: str, other: str) -> bool:
    if difflib.SequenceMatcher(None, name, other).ratio() >= MIN_SIMILARITY:
        return True
    edits = _edit_distance(name, other)
    return edits <= MAX_EDITS and 3 * edits <= max(len(name), len(other))


def _edit_distance(first: str, second: str) -> int:
    """Return the number of insertions, deletions, replacements and swaps of neighbors (optimal string alignment)."""
    rows = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, 1):
        above, row = rows[-1], [i]
        for j, other in enumerate(second, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def migration_tables() -> dict[str, str]:
    """Return the key tables of ``docs/migration.md`` as Markdown, by project."""
    tables = {}
    for project in PROJECTS:
        rows = [f"| {project.name} | here |", "|---|---|"]
        for entry in project.keys:
            names = ", ".join(f"`{name}`" for name in entry.names)
            here = f"`{entry.key}` (accepted)" if entry.key else ""
            text = "; ".join(part for part in (here, entry.advice) if part)
            rows.append(f"| {names} | {text} |".replace("\\|", "|"))
        tables[project.name] = "\n".join(rows)
    return tables
