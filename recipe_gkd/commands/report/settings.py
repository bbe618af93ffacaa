"""Configuration and checkpoints of a run."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml
from omegaconf import OmegaConf

from recipe_gkd.checkpoints.folders import final_folder
from recipe_gkd.commands.report.markup import table, text
from recipe_gkd.commands.report.run_files import Run
from recipe_gkd.config.compose import compose_config
from recipe_gkd.config.keys import ENV_VARS
from recipe_gkd.errors import ConfigError

SECRET = re.compile(r"(api_?key|secret|password|passwd|credential|(^|_)token)$", re.IGNORECASE)
HIDDEN = "(not shown)"
_ABSENT = object()


def settings_section(run: Run) -> str:
    """Return the changed keys and the complete configuration as HTML."""
    if not run.config:
        return '<p class="lead">The run has no readable config.yaml.</p>'
    config = hide_secrets(run.config)
    changed = changed_keys(config)
    rows = [
        [f"<code>{text(key)}</code>", f"<code>{_value(value)}</code>", f"<code>{_value(default)}</code>"]
        for key, value, default in changed
    ]
    whole = text(yaml.safe_dump(config, sort_keys=False, width=100))
    return (
        f'<p class="lead">{len(rows)} keys differ from the defaults of on_policy_distill_trainer.yaml.</p>'
        f'<div class="card">{table(["key", "value", "default"], rows, "keys")}</div>'
        f'<details class="card"><summary>All keys</summary><pre class="yaml">{whole}</pre></details>'
    )


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
    return text("(required)" if shown == "???" else shown)


def checkpoints_section(run: Run) -> str:
    """Return the checkpoints and the commands to resume and to export as HTML."""
    if not run.checkpoints:
        return '<p class="lead">The run folder has no checkpoint yet.</p>'
    best = None if run.best is None else run.best.step
    rows = []
    for checkpoint in reversed(run.checkpoints):
        marks = [
            *(["latest"] if checkpoint.step == run.latest else []),
            *(["best"] if checkpoint.step == best else []),
        ]
        state = f"incomplete: {checkpoint.damage}" if checkpoint.damage else "complete"
        tags = "".join(f'<span class="tag">{mark}</span>' for mark in marks)
        parts = ", ".join(checkpoint.parts)
        rows.append([f"global_step_{checkpoint.step} {tags}", text(state), text(parts), _size(checkpoint.n_bytes)])
    usable = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.damage is None]
    lines = (
        "# same command as before: continues after the latest checkpoint\n"
        "python -m recipe_gkd.main_gkd ... trainer.resume_mode=auto"
    )
    if (step := best if best in usable else run.latest) is not None:
        lines += (
            "\n\n# a Hugging Face folder for inference\n"
            f"python -m recipe_gkd export {shlex.quote(str(final_folder(run.folder, step)))} OUT"
        )
    chosen = ""
    if run.best is not None:
        without = "" if run.best.has_checkpoint else " These are the weights that the run started from."
        chosen = f'<p class="lead">Best: step {best}, {text(run.best.metric)} = {text(run.best.value)}.{without}</p>'
    head = ["checkpoint", "state", "parts", ">size"]
    return f'{chosen}<div class="card">{table(head, rows)}<pre class="shell">{text(lines)}</pre></div>'


def _size(n_bytes: int) -> str:
    unit, name = next(
        (unit, name)
        for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "B"))
        if n_bytes >= unit or unit == 1
    )
    return f"{n_bytes / unit:.3g} {name}"
