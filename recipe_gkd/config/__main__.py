"""Print every config key with its default and its description: ``python -m recipe_gkd.config``.

The defaults come from ``config/on_policy_distill_trainer.yaml``.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from recipe_gkd.config.aliases import migration_tables, unknown_key_error
from recipe_gkd.config.choices import OneOf
from recipe_gkd.config.compose import default_values, value_at
from recipe_gkd.config.key_types import description, known_keys, type_of
from recipe_gkd.config.ranges import numeric_range
from recipe_gkd.runtime.closed_output import run_until_closed

LINE_WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Print the reference of the keys.

    Returns:
        Exit status: 0, or 1 if no key matches.
    """
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd.config",
        description="Print the configuration keys with their defaults, descriptions, choices and ranges.",
        epilog="Examples: python -m recipe_gkd.config gkd; python -m recipe_gkd.config trainer.save_freq temperature",
    )
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="key, section, or part of a key's name (default: all, as Markdown)"
    )
    parser.add_argument(
        "--migration", action="store_true", help="print the keys of other projects and what to write here, as Markdown"
    )
    arguments = parser.parse_args(argv)
    if arguments.migration:
        print("\n\n".join(f"### {project}\n\n{table}" for project, table in migration_tables().items()))
    elif not arguments.keys:
        print(reference())
    else:
        return _print_matches(arguments.keys)
    return 0


def reference() -> str:
    """Return the table of all keys as Markdown, in the order of the schema."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    rows += [f"| `{name}` | {default} | {meaning} |" for name, default, meaning in _entries()]
    return "\n".join(rows)


def _entries() -> list[tuple[str, str, str]]:
    """Return name, default and meaning of each key, as Markdown."""
    entries = []
    for name, field in known_keys().items():
        default = value_at(default_values(), name)
        shown = "*must be set*" if default == "???" else f"`{json.dumps(default)}`"
        entries.append((name, shown, f"{description(field)}{_choices(type_of(name))}{_range(name)}"))
    return entries


def _print_matches(wanted: Sequence[str]) -> int:
    entries = _entries()
    names = {
        text: [name for name, *_ in entries if name == text or name.startswith(f"{text}.")]
        or [name for name, *_ in entries if text in name]
        for text in wanted
    }
    matched = {name for found in names.values() for name in found}
    for name, default, meaning in entries:
        if name in matched:
            print(f"{name}  (default: {default.strip('`*')})")
            print(textwrap.fill(meaning, LINE_WIDTH, initial_indent="    ", subsequent_indent="    "))
    unknown = [text for text, found in names.items() if not found]
    for text in unknown:
        print(f"error: {unknown_key_error(text, known_keys())}", file=sys.stderr)
    return 1 if unknown else 0


def _range(name: str) -> str:
    values = numeric_range(name)
    return f" Range: {values}." if values else ""


def _choices(hint: Any) -> str:
    for check in getattr(hint, "__metadata__", ()):
        if isinstance(getattr(check, "func", None), OneOf):
            return " One of " + ", ".join(f"`{choice}`" for choice in check.func.names()) + "."
    if get_origin(hint) is Literal:
        return " One of " + ", ".join(f"`{choice}`" for choice in get_args(hint)) + "."
    if get_origin(hint) is list and get_origin(get_args(hint)[0]) is Literal:
        return " Any of " + ", ".join(f"`{choice}`" for choice in get_args(get_args(hint)[0])) + "."
    return ""


if __name__ == "__main__":
    sys.exit(run_until_closed(main))
