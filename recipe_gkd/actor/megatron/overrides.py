"""Check of the fields of Megatron's configuration classes that a user sets directly."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from recipe_gkd.errors import ConfigError

MEGATRON = "actor_rollout_ref.actor.megatron"


def checked_overrides(
    section: str, overrides: Mapping[str, Any], target: type, fixed: Mapping[str, str]
) -> dict[str, Any]:
    """Return the overrides of a configuration class of Megatron.

    Args:
        section: Name of the section in ``actor_rollout_ref.actor.megatron``.
        overrides: Values by name of the field.
        target: Dataclass whose fields are set.
        fixed: Fields that must not be overridden, each with the reason.

    Raises:
        ConfigError: A field is unknown or must not be overridden.
    """
    prefix = f"{MEGATRON}.{section}"
    for name in sorted(fixed.keys() & overrides.keys()):
        raise ConfigError(f"{prefix}.{name}={overrides[name]} is not allowed, because {fixed[name]}; remove it")
    names = [field.name for field in dataclasses.fields(target) if field.init]
    for name in overrides:
        if name not in names:
            closest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {closest[0]}?" if closest else f"see megatron.core's class {target.__name__}"
            raise ConfigError(f"{prefix}.{name} is unknown: {hint}")
    return dict(overrides)
