"""Configuration and checkpoints of a run."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml
from omegaconf import OmegaConf

from recipe_gkd.checkpoints.folders import final_folder
from recipe_gkd.commands.report.run_files import Run
from recipe_gkd.commands.report.templates import render
from recipe_gkd.config.compose import compose_config
from recipe_gkd.config.keys import ENV_VARS
from recipe_gkd.errors import ConfigError

SECRET = re.compile(r"(api_?keys?|secrets?|passwords?|passwd|credentials?|(^|_)token)$", re.IGNORECASE)
HIDDEN = "(not shown)"
_ABSENT = object()


def settings_section(run: Run) -> str:
    """Return the changed keys and the complete configuration as HTML."""
    if not run.config:
        return render("settings.html", whole="")
    config = hide_secrets(run.config)
    changed = [(key, _value(value), _value(default)) for key, value, default in changed_keys(config)]
    return render("settings.html", changed=changed, whole=yaml.safe_dump(config, sort_keys=False, width=100))


def changed_keys(config: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return key, value and default of each key that differs from its default.

    Args:
        config: Configuration with all defaults.
    """
    try:
        composed = OmegaConf.to_container(
            compose_config("on_policy_distill_trainer", []), resolve=True, throw_on_missing=False
        )
    except ConfigError:
        composed = {}
    defaults = _flat(composed if isinstance(composed, dict) else {})
    return [
        (key, value, defaults.get(key, _ABSENT))
        for key, value in _flat(config).items()
        if defaults.get(key, _ABSENT) != value and not (key not in defaults and value in (None, [], {}))
    ]


def hide_secrets(value: object, key: str = "") -> Any:
    """Return a configuration without environment variables and values of keys that look like secrets."""
    if isinstance(value, dict):
        is_environment = key == ENV_VARS
        return {
            name: HIDDEN if is_environment else hide_secrets(part, f"{key}.{name}" if key else str(name))
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [hide_secrets(part, key) for part in value]
    if isinstance(value, str) and SECRET.search(key.rpartition(".")[2]):
        return HIDDEN
    return value


def _flat(config: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def _value(value: object) -> str:
    if value is _ABSENT:
        return ""
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return "(required)" if shown == "???" else shown


def checkpoints_section(run: Run) -> str:
    """Return the checkpoints and the commands to resume and to export as HTML."""
    best = None if run.best is None else run.best.step
    usable = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.damage is None]
    step = best if best in usable else run.latest
    return render(
        "checkpoints.html",
        checkpoints=run.checkpoints,
        best=run.best,
        latest=run.latest,
        last_step=run.last_step,
        exported=None if step is None else shlex.quote(str(final_folder(run.folder, step))),
    )
