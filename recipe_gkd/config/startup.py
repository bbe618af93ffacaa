"""Deadline of the start of the workers."""

from __future__ import annotations

from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema import Config
from recipe_gkd.runtime.keyed_timeout import KeyedTimeout

DEFAULT_STARTUP_TIMEOUT_S = {"cpu": 600.0, "cuda": 1800.0}
"""Defaults of ``trainer.startup_timeout_s``. On CUDA the first start compiles kernels, which can take many minutes."""


def startup_timeout_s(config: Config, device: str) -> KeyedTimeout:
    """Return the deadline of each phase of the start, in seconds.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    configured = config.trainer.startup_timeout_s
    seconds = DEFAULT_STARTUP_TIMEOUT_S[device] if configured is None else configured
    return KeyedTimeout(seconds, key_name(lambda config: config.trainer.startup_timeout_s))
