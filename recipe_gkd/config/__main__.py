"""Print every config key with its default and its description: ``python -m recipe_gkd.config``.

The defaults are those of ``config/on_policy_distill_trainer.yaml``.
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from omegaconf import OmegaConf

from recipe_gkd.config.choices import OneOf
from recipe_gkd.config.load import compose_config, description, known_keys, type_of
from recipe_gkd.config.ranges import numeric_range


def reference() -> str:
    """Return the table of all keys as Markdown, in the order of the schema."""
    defaults: Any = OmegaConf.to_container(compose_config("on_policy_distill_trainer"), resolve=False)
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in known_keys().items():
        default = _value_at(defaults, name)
        shown = "*must be set*" if default == "???" else f"`{json.dumps(default)}`"
        rows.append(f"| `{name}` | {shown} | {description(field)}{_choices(type_of(name))}{_range(name)} |")
    return "\n".join(rows)


def _value_at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


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
    print(reference())
