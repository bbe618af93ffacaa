"""Check of the fields of Megatron's configuration classes that a user sets directly."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from recipe_gkd.config.keys import MEGATRON
from recipe_gkd.errors import ConfigError

_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


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
        ConfigError: A field is unknown or must not be overridden, or its value has a wrong type.
    """
    prefix = f"{MEGATRON}.{section}"
    for name in sorted(fixed.keys() & overrides.keys()):
        raise ConfigError(
            f"{prefix}.{name}={overrides[name]} is not allowed, because {fixed[name]}",
            remedy="remove it",
            keys=(f"{prefix}.{name}",),
        )
    names = [field.name for field in dataclasses.fields(target) if field.init]
    hints = get_type_hints(target) if overrides else {}
    for name, value in overrides.items():
        if name not in names:
            closest = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {closest[0]}?" if closest else f"see megatron.core's class {target.__name__}"
            raise ConfigError(
                f"{prefix}.{name} is unknown: {hint}",
                keys=(f"{prefix}.{name}",),
                suggestions=tuple(f"{prefix}.{known}" for known in closest),
            )
        if expected := _type_problem(hints[name], value):
            raise ConfigError(
                f"{prefix}.{name}={value}: {expected}",
                remedy=f"see megatron.core's class {target.__name__}",
                keys=(f"{prefix}.{name}",),
            )
    return dict(overrides)


def _type_problem(hint: Any, value: object) -> str:
    """Return what a value of a YAML file should be instead, empty if it fits. Megatron does not convert values."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # types with their own configuration
        adapter = TypeAdapter(hint)
    try:
        converted = adapter.validate_python(value)
    except ValidationError as error:
        if hint is bool:
            return f"expected {_NAMES[bool]}"
        messages = dict.fromkeys(problem["msg"].replace("Input should be", "expected") for problem in error.errors())
        return " or ".join(messages)
    kinds = type(value), type(converted)
    if kinds[0] is kinds[1] or kinds == (int, float) or isinstance(value, list):
        return ""
    return f"expected {_NAMES.get(kinds[1], kinds[1].__name__)}"
