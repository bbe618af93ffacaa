"""Answers to unknown keys: keys of other projects, and known keys with a similar name.

:mod:`~recipe_gkd.config.foreign_keys` has the table of the other projects' keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from recipe_gkd.config.foreign_keys import PROJECTS, ForeignKey
from recipe_gkd.config.foreign_keys.entries import ANY
from recipe_gkd.errors import ConfigError

MIN_SIMILARITY = 0.85
MAX_SUGGESTIONS = 3
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
        """Return the warning for an override with this value, which was translated or left out."""
        overrides = self.entry.translate(value)
        if not overrides:
            return f"{self.name}={value} is a key of {self.project} and has no effect here; {self.entry.advice}"
        advice = f" ({self.entry.advice})" if self.entry.advice and self.key else ""
        read_as, names = " and ".join(overrides), " and ".join(text.partition("=")[0] for text in overrides)
        return f"{self.name} is a key of {self.project} and is read as {read_as}{advice}; write {names}"

    def refusal(self, value: object = None) -> ConfigError:
        """Return the error for the key, with what to write instead.

        Args:
            value: The key's value in a file, None if it is not needed.
        """
        overrides = self.entry.translate(str(value)) if value is not None else None
        written = (self.key,) if self.key is not None else overrides or ()
        return ConfigError(
            f"unknown key {self.name}: it is a key of {self.project}",
            remedy=f"write {' '.join(written)}" if written else self.entry.advice,
            keys=(self.name,),
            suggestions=tuple(text.partition("=")[0] for text in written),
        )


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


def unknown_key_error(name: str, known: Iterable[str], value: object = None) -> ConfigError:
    """Return the error for an unknown key.

    Args:
        name: Dotted name of the unknown key.
        known: All known keys.
        value: Its value, None if it is not needed.
    """
    known = list(known)
    if alias := find_alias(name):
        return alias.refusal(value)
    if suggestions := _suggestions(name, known):
        what = f"unknown key {name}: did you mean {' or '.join(suggestions)}?"
        return ConfigError(what, keys=(name,), suggestions=tuple(suggestions))
    section = name.rpartition(".")[0]
    while section and not any(key.startswith(f"{section}.") for key in known):
        section = section.rpartition(".")[0]
    remedy = "list the keys with `python -m recipe_gkd.config`"
    if section:
        remedy = f"list the keys of the section {section} with `python -m recipe_gkd.config {section}`"
    return ConfigError(f"unknown key {name}", remedy=remedy, keys=(name,))


def _suggestions(name: str, known: list[str]) -> list[str]:
    """Return the known keys with the same or a similar name in the section that the user wrote.

    A key of another section has another meaning, even if its name is similar. The first parts of a section may be left
    out, its parts may be misspelled, and a name without a section belongs to all of them.
    """
    section, _, last = name.rpartition(".")
    split = [key.rpartition(".") for key in known]
    inside = [(key, other) for key, (there, _, other) in zip(known, split, strict=True) if _is_section(section, there)]
    below = [
        (key, other)
        for key, (there, _, other) in zip(known, split, strict=True)
        if section and there.startswith(f"{section}.")
    ]
    groups = (
        [key for key, other in inside if other == last and (section or "_" in last)],
        [key for key, other in inside if _is_similar(last, other)],
        [key for key, other in below if other == last],
    )
    candidates = next((group for group in groups if group), [])
    if section and len(candidates) > 1 and candidates != groups[2]:
        return [max(candidates, key=lambda key: difflib.SequenceMatcher(None, name, key).ratio())]
    return candidates if len(candidates) <= MAX_SUGGESTIONS else []


def _is_section(written: str, section: str) -> bool:
    """Return True if ``written`` is the name of a section, its end, or a misspelled form of one of these."""
    if not written:
        return True
    theirs = written.split(".")
    ours = section.split(".")[-len(theirs) :]
    return len(ours) == len(theirs) and all(a == b or _is_similar(a, b) for a, b in zip(theirs, ours, strict=True))


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
            text = "; ".join(part for part in (here, entry.advice, _accepted_values(entry)) if part)
            rows.append(f"| {names} | {text} |".replace("\\|", "|"))
        tables[project.name] = "\n".join(rows)
    return tables


def _accepted_values(entry: ForeignKey) -> str:
    """Return the values with which an override is accepted without being a key of ours, as Markdown."""
    if entry.fixed == ANY:
        return "accepted without effect"
    read = [f"`{value}` is read as `{overrides}`" for value, overrides in entry.values.items()]
    read += [f"`{value}` is accepted without effect" for value in entry.fixed]
    return ", ".join(read)
