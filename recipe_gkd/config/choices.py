"""Values of enumerated keys that are defined in :mod:`recipe_gkd.losses`.

The functions import the losses when they are called: a configuration module must not depend on torch to be imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipe_gkd.errors import ConfigError


@dataclass(frozen=True)
class OneOf:
    """Validator that accepts the names that a function returns.

    Attributes:
        names: Function that returns the accepted values.
    """

    names: Callable[[], tuple[str, ...]]

    def __call__(self, value: str) -> str:
        """Return ``value``.

        Raises:
            ConfigError: It is not one of the names.
        """
        if value not in self.names():
            raise ConfigError(f"got {value!r}; expected one of {', '.join(self.names())}")
        return value


def loss_names() -> tuple[str, ...]:
    """Return the values of ``gkd.distill_loss_type``."""
    from recipe_gkd.losses import registry

    return registry.loss_names()


def tail_modes() -> tuple[str, ...]:
    """Return the values of ``gkd.tail``."""
    from recipe_gkd.losses.distributions import TAIL_MODES

    return TAIL_MODES


def importance_modes() -> tuple[str, ...]:
    """Return the values of ``gkd.importance``."""
    from recipe_gkd.losses.sampled_token import IMPORTANCE_MODES

    return IMPORTANCE_MODES


def kernel_backends() -> tuple[str, ...]:
    """Return the values of ``gkd.kernel_backend``."""
    from recipe_gkd.losses.kernel_backend import KERNEL_BACKENDS

    return KERNEL_BACKENDS


def absolute_path(value: str | None) -> str | None:
    """Return an absolute path. Workers may run in another folder than the command."""
    return None if value is None else str(Path(value).resolve())


def absolute_source(value: str | None) -> str | None:
    """Return ``FILE.py:Name`` with an absolute path. A value of another form is returned as it is."""
    path, separator, name = (value or "").rpartition(":")
    return f"{absolute_path(path)}:{name}" if separator and path else value
