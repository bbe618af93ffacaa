"""Warnings and errors for keys that nothing reads in a configuration. Each field of the schema has its conditions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field
from operator import attrgetter
from typing import Any

from recipe_gkd.config.compose import default_values, value_at
from recipe_gkd.config.key_types import known_keys
from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema import Config
from recipe_gkd.config.schema.unused import UnusedWhen, as_override_value
from recipe_gkd.errors import ConfigError


def unused_key_warnings(config: Config, set_keys: Collection[str]) -> list[str]:
    """Return a warning for each key that the user set and that nothing reads. Null and empty lists select nothing.

    Args:
        config: A validated configuration.
        set_keys: Keys that the user set.
    """
    warnings = []
    for name, field in known_keys().items():
        if name not in set_keys or (value := attrgetter(name)(config)) in (None, [], {}):
            continue
        rule = next((rule for rule in unused_conditions(field) if rule.condition(config)), None)
        if rule is not None:
            because = key_name(rule.because)
            warnings.append(
                f"{name}={_shown(value)} has no effect with {because}={_shown(rule.because(config))}; "
                f"{rule.remedy or f'set {because}={rule.enable}'}, or leave {name} out"
            )
    return warnings


def unused_key_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each key that nothing reads and whose value differs from its default."""
    for name, field in known_keys().items():
        for rule in (rule for rule in field.metadata["refused"] if rule.condition(config)):
            because, default = key_name(rule.because), value_at(default_values(), name)
            if (value := attrgetter(name)(config)) != default:
                yield ConfigError(
                    f"{name}={_shown(value)} has no effect with {because}={_shown(rule.because(config))}",
                    remedy=f"set it to {_shown(default)}, or set {because}={rule.enable}",
                    keys=(name, because),
                )


def unused_conditions(field: Field[Any]) -> Sequence[UnusedWhen]:
    """Return the conditions under which nothing reads a key, in the order of precedence."""
    conditions: Sequence[UnusedWhen] = field.metadata["unused"]
    return conditions


def _shown(value: object) -> str:
    """Return a value as it is written in an override; of a mapping, the names."""
    return f"{{{', '.join(value)}}}" if isinstance(value, Mapping) else as_override_value(value)
