"""Command line overrides, checked before Hydra composes them.

Hydra's own check reports the first unknown key only, names no known key, and accepts any key with a + prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from recipe_gkd.config.aliases import find_alias, unknown_key_error
from recipe_gkd.config.caller import resolve_override
from recipe_gkd.config.grammar import ValueKind, grammar_error, parse
from recipe_gkd.errors import ConfigError

HYDRA_KEYS_IN_USE = ("hydra.searchpath",)


@dataclass(frozen=True, kw_only=True)
class CheckedOverrides:
    """Overrides after their keys were checked and translated.

    Attributes:
        accepted: Overrides for Hydra, with keys of this project.
        keys: Keys that they set. A section that is set as a mapping counts with each of its keys.
        warnings: Messages about overrides that were translated or have no effect.
        problems: Errors of overrides that cannot be used.
        origins: Our key -> override of another project's key that sets it.
    """

    accepted: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    problems: tuple[ConfigError, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OverrideRules:
    """Keys that an override may have.

    Attributes:
        known: All keys of the configuration.
        free_form: Sections in which users choose the names of the keys.
        is_group: Function that returns True for the name of a config group of Hydra.
        lists: Keys whose value is a list.
    """

    known: Collection[str]
    free_form: Sequence[str]
    is_group: Callable[[str], bool]
    lists: Collection[str] = ()

    def check(self, overrides: Sequence[str]) -> CheckedOverrides:
        """Check the keys of all overrides, and translate keys of other projects.

        Args:
            overrides: Overrides of the form ``key=value``.
        """
        checked = [self._check(text) for text in overrides]
        return CheckedOverrides(
            accepted=tuple(text for one in checked for text in one.accepted),
            keys=frozenset(key for one in checked for key in one.keys),
            warnings=tuple(text for one in checked for text in one.warnings),
            problems=tuple(error for one in checked for error in one.problems) + _conflicts(overrides, checked),
            origins={key: text for one in checked for key, text in one.origins.items()},
        )

    def _check(self, text: str) -> CheckedOverrides:
        text = resolve_override(text)
        try:
            text, override = parse(text)
        except HydraException as error:
            return CheckedOverrides(problems=(self._grammar_error(text, " ".join(str(error).split())),))
        if override.is_sweep_override():
            return CheckedOverrides(problems=(self._grammar_error(text, "a comma separates the values of a sweep"),))
        key = override.key_or_group
        if key.startswith("hydra.") and key not in HYDRA_KEYS_IN_USE:
            warning = (
                f"{key} has no effect, because Hydra only composes the configuration; leave it out. The run folder is "
                "trainer.default_local_dir"
            )
            return CheckedOverrides(warnings=(warning,))
        if self._is_known(key):
            keys = set(self._keys_of(override))
            problems = tuple(unknown_key_error(name, self.known) for name in sorted(keys) if not self._is_known(name))
            if problems:
                return CheckedOverrides(problems=problems)
            return CheckedOverrides(accepted=(self._prefixed(text),), keys=frozenset(keys))
        if self.is_group(key) or key.startswith("hydra"):
            return CheckedOverrides(accepted=(text,))
        alias, value = find_alias(key), text.partition("=")[2]
        translated = None if alias is None or override.is_delete() else alias.entry.translate(value)
        if alias is None or translated is None:
            return CheckedOverrides(problems=(unknown_key_error(key, self.known),))
        translated = tuple(map(resolve_override, translated))
        names = frozenset(one.partition("=")[0] for one in translated)
        origins = dict.fromkeys(names, f"{key}={value}")
        return CheckedOverrides(accepted=translated, keys=names, warnings=(alias.warning(value),), origins=origins)

    def _grammar_error(self, text: str, reason: str) -> ConfigError:
        key = text.partition("=")[0].lstrip("+")
        is_scalar = key in self.known and key not in self.free_form
        kind: ValueKind = "list" if key in self.lists else "scalar" if is_scalar else "unknown"
        return grammar_error(text, reason, kind)

    def _is_known(self, name: str) -> bool:
        below = tuple(f"{section}." for section in self.free_form)
        return name in self.known or name in self._sections or name.startswith(below)

    @property
    def _sections(self) -> set[str]:
        return {key.rsplit(".", n)[0] for key in self.known for n in range(1, key.count(".") + 1)}

    def _prefixed(self, text: str) -> str:
        """Return an override with which Hydra also adds keys that the YAML files do not have, in free-form sections."""
        free = tuple(section + separator for section in self.free_form for separator in ".=")
        return f"++{text}" if text.startswith(free) else text

    def _keys_of(self, override: Override) -> list[str]:
        value = None if override.is_delete() else override.value()
        return leaf_names(override.key_or_group, value, lambda name: name in self._sections)


def _conflicts(overrides: Sequence[str], checked: Sequence[CheckedOverrides]) -> tuple[ConfigError, ...]:
    """Return errors for the keys to which an override of another project's key and a different one give two values.

    A key that is repeated under one name has its last value, as in Hydra.
    """
    values: dict[str, dict[str, Any]] = {}  # our key -> name in the override -> (override, value)
    for text, one in zip(overrides, checked, strict=True):
        name = text.partition("=")[0].lstrip("+")
        for accepted in one.accepted:
            for key, value in _leaf_values(accepted).items():
                values.setdefault(key, {})[name if key in one.origins else key] = (text, value)
    problems = []
    for key, by_name in values.items():
        texts, found = zip(*by_name.values(), strict=True)
        if any(value != found[0] for value in found[1:]):
            problems.append(
                ConfigError(
                    f"{' and '.join(texts)} set {key} to different values",
                    remedy=f"write one of them, {key}=VALUE",
                    keys=(key,),
                )
            )
    return tuple(problems)


def _leaf_values(text: str) -> dict[str, Any]:
    """Return the keys that an override sets, with their values."""
    override = parse(text)[1]
    return {} if override.is_delete() else leaf_values(override.key_or_group, override.value())


def leaf_names(name: str, value: Any, is_section: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return the names of the keys that a value sets, the keys of :func:`leaf_values`."""
    return list(leaf_values(name, value, is_section))


def leaf_values(name: str, value: Any, is_section: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Return the keys that a value sets, with their values.

    Args:
        name: Name of the key with this value.
        value: Its value. Each key of a mapping counts by itself.
        is_section: Function that returns False for the name of a key whose value is a mapping.
    """
    if not (isinstance(value, Mapping) and value and is_section(name)):
        return {name: value}
    found: dict[str, Any] = {}
    for inner, below in value.items():
        found |= leaf_values(f"{name}.{inner}", below, is_section)
    return found
