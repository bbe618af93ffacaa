"""Checks of the loggers of ``trainer.logger`` before workers start. The loggers themselves open after that."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence

from recipe_gkd.config.schema import BUILT_IN_LOGGERS
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import load_attribute, split_spec
from recipe_gkd.runtime.wait_log import waiting_for

log = logging.getLogger(__name__)
_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
_REMEDY = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to upload later with `wandb sync`"
_SWANLAB_REMEDY = (
    "run `swanlab login`, set SWANLAB_API_KEY, or set SWANLAB_MODE=offline to upload later with `swanlab sync`"
)

_REJECTED = re.compile(r"not logged in|invalid credentials|unauthorized|forbidden|\b40[13]\b|API key", re.IGNORECASE)
"""Text of W&B's error for a wrong key. It has the same class as the error for a service that does not answer."""


def check_loggers(specs: Sequence[str]) -> None:
    """Load the users' logger classes, log in to Weights & Biases and look for SwanLab's API key if the run uses them.

    MLflow needs no login to files, and has no command that stores one for a server.

    Args:
        specs: ``trainer.logger``.

    Raises:
        ConfigError: A class cannot be loaded, or an API key is missing or rejected. A service that does not answer is
            a warning.
    """
    for spec in specs:
        if spec not in BUILT_IN_LOGGERS:
            path, name = split_spec(spec, key="trainer.logger")
            load_attribute(path, name, key="trainer.logger")
    if "wandb" in specs:
        with waiting_for("start, log in to wandb", None, "Weights & Biases"):
            _check_wandb()
    if "swanlab" in specs:
        _check_swanlab()


def _check_wandb() -> None:
    if os.environ.get("WANDB_MODE") in _WITHOUT_LOGIN:
        return
    import wandb

    if wandb.setup().settings.mode in _WITHOUT_LOGIN:  # `wandb offline` writes it to a file
        return
    try:
        if wandb.login(prompt=False):
            return
    except wandb.errors.Error as error:
        if not _REJECTED.search(str(error)):
            log.warning(
                "trainer.logger has wandb, but the login could not be checked: %s; the run starts, and its logger "
                "tries again. WANDB_MODE=offline needs no service",
                error,
            )
            return
        what = f"trainer.logger has wandb, but its login failed: {error}"
        raise ConfigError(what, remedy=_REMEDY, keys=("trainer.logger",)) from error
    raise ConfigError("trainer.logger has wandb, but no API key was found", remedy=_REMEDY, keys=("trainer.logger",))


def _check_swanlab() -> None:
    import swanlab

    settings = swanlab.Settings()  # reads the environment, its YAML files and the file of `swanlab login`
    if settings.mode == "online" and not settings.api_key:  # with a terminal, swanlab.init() would wait for an answer
        raise ConfigError(
            "trainer.logger has swanlab, but no API key was found",
            remedy=_SWANLAB_REMEDY,
            keys=("trainer.logger",),
        )
