"""Files of a run, read for its report."""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe_gkd.checkpoints.folders import damage, final_folder, steps_of
from recipe_gkd.checkpoints.newest import newest_complete
from recipe_gkd.checkpoints.run_folder import CONFIG, LOG
from recipe_gkd.checkpoints.state import Best
from recipe_gkd.checkpoints.store import recorded_best
from recipe_gkd.commands.report.series import Series
from recipe_gkd.errors import CheckpointError, DataError
from recipe_gkd.metrics.run_events import read_events
from recipe_gkd.runtime.run_log import FROM_MODEL_FOLDER, RESUMED

METRICS, STEP = "metrics.jsonl", "training/global_step"
MAX_RECENT_STEPS = 2000
"""Number of last steps whose complete metrics are kept, for the advice."""
MAX_LOG_BYTES = 32 << 20
"""Bytes of the end of the log that are searched for advice."""
_ADVICE = re.compile(r"^(\S+) I recipe_gkd\.metrics\.steps: (.*\(idle: .*)$")
_START = re.compile(rf"^\S+ I recipe_gkd: ({RESUMED}|{FROM_MODEL_FOLDER})")


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint folder of the run.

    Attributes:
        step: Number of optimizer steps.
        n_bytes: Size of all its files, in bytes.
        damage: Reason why it is incomplete, None if it is complete.
        parts: Names of the folders in it.
    """

    step: int
    n_bytes: int
    damage: str | None
    parts: tuple[str, ...]


@dataclass(kw_only=True)
class Run:
    """Content of a run folder.

    Attributes:
        series: Values of each metric, by name.
        recent: Complete metrics of the last :data:`MAX_RECENT_STEPS` steps, oldest first.
        config: Configuration with all defaults. Empty if its file is missing.
        advice: Time of day and text of each advice in the log, since training began or continued last.
        validations: File of the responses of each validation up to :attr:`last_step`, by step, ascending.
        checkpoints: All checkpoints, ascending. Those after :attr:`last_step` can belong to an abandoned history.
        latest: Step of the checkpoint that a resumed run starts from.
        best: Best weights by ``trainer.best_metric``. None if there are none.
        notes: Problems of the files that the reader of the report must know.
        events: Starts, ends and restarts, oldest first.
    """

    folder: Path
    series: dict[str, Series]
    recent: list[Mapping[str, float]]
    config: dict[str, Any] = field(default_factory=dict)
    advice: list[tuple[str, str]] = field(default_factory=list)
    validations: dict[int, Path] = field(default_factory=dict)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    latest: int | None = None
    best: Best | None = None
    notes: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Number of the last step with metrics."""
        return last_step(self.series)

    def setting(self, key: str) -> object:
        """Return the value of a dotted key of the configuration, None if it has none."""
        value: object = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def read_run(folder: Path) -> Run:
    """Read all files of a run that the report shows.

    Raises:
        DataError: The folder has no metrics.
    """
    notes: list[str] = []
    series, recent = read_metrics(folder / METRICS, notes)
    newest = newest_complete(folder)
    notes += [f"Checkpoints: {reason}." for reason in newest.reasons]
    return Run(
        folder=folder,
        series=series,
        recent=recent,
        config=_read_config(folder / CONFIG, notes),
        advice=read_advice(folder / LOG),
        validations=find_validations(folder / "validation", last_step(series)),
        checkpoints=[read_checkpoint(folder, step) for step in steps_of(folder)],
        latest=newest.step,
        best=_read_best(folder, notes),
        notes=notes,
        events=read_events(folder),
    )


def last_step(series: Mapping[str, Series]) -> int:
    """Return the number of the last step with metrics."""
    return max((int(each.steps[-1]) for each in series.values()), default=0)


def read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Series], list[Mapping[str, float]]]:
    """Read the metrics of all steps.

    Args:
        path: File with one JSON object per line.
        notes: List to which problems of single lines are appended.

    Returns:
        The series of each metric, and the complete metrics of the last steps.

    Raises:
        DataError: The file is missing or has no step.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); expected the folder of a run with {METRICS}, which is written "
            "if trainer.logger has jsonl",
            file=path,
        ) from error
    columns: dict[str, tuple[array[float], array[float]]] = {}
    recent: deque[Mapping[str, float]] = deque(maxlen=MAX_RECENT_STEPS)
    n_damaged, not_finite = 0, set()
    with file:
        for line in file:
            try:
                record = json.loads(line)
                step = float(record[STEP])
            except (ValueError, KeyError, TypeError):
                n_damaged += bool(line.strip())
                continue
            recent.append(record)
            for name, value in record.items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                if not math.isfinite(value):
                    not_finite.add(name)
                    continue
                steps, values = columns.setdefault(name, (array("d"), array("d")))
                steps.append(step)
                values.append(value)
    if not recent:
        remedy = f"wait for the first step, or read {path.with_name(LOG)}"
        raise DataError(f"{path} has no complete step", remedy=remedy, file=path)
    if n_damaged:
        notes.append(f"{n_damaged} line(s) of {METRICS} cannot be read and are left out.")
    if not_finite:
        notes.append(f"Values that are not finite are left out: {', '.join(sorted(not_finite))}.")
    return {name: Series.from_columns(name, *columns[name]) for name in columns if name != STEP}, list(recent)


def read_advice(path: Path) -> list[tuple[str, str]]:
    """Return time of day and text of each advice since training began or continued last.

    Only the end of the log is read. The result is empty if the log cannot be read.
    """
    found: list[tuple[str, str]] = []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            for line in file:
                text = line.decode("utf-8", "replace").rstrip()
                if _START.match(text):
                    found.clear()
                elif match := _ADVICE.match(text):
                    found.append((match[1], match[2]))
    except OSError:
        return []
    return found


def find_validations(folder: Path, until: int) -> dict[int, Path]:
    """Return the files of validation responses by step, ascending.

    Args:
        until: Last step. Files of later steps are left by a run that was started again from an earlier step.
    """
    found = {re.fullmatch(r"step_(\d+)\.jsonl", path.name): path for path in folder.glob("step_*.jsonl")}
    return dict(sorted((int(match[1]), path) for match, path in found.items() if match and int(match[1]) <= until))


def read_responses(path: Path, max_lines: int = 20_000) -> dict[tuple[str, Any], dict[str, Any]]:
    """Return the first response to each prompt of a validation.

    Args:
        path: File that :func:`recipe_gkd.validation.records.response_lines` wrote.
        max_lines: Number of lines to read.

    Returns:
        Records by data source and row. Lines that cannot be read are left out.
    """
    responses: dict[tuple[str, Any], dict[str, Any]] = {}
    with path.open("rb") as file:
        for _, line in zip(range(max_lines), file, strict=False):
            try:
                record = json.loads(line)
                responses.setdefault((str(record["data_source"]), record["row"]), record)
            except (ValueError, KeyError, TypeError):
                continue
    return responses


def read_checkpoint(run: Path, step: int) -> CheckpointRecord:
    """Return the description of a checkpoint folder, which a run in progress may be removing."""
    folder = final_folder(run, step)
    found = list(os.walk(folder))  # folders that do not exist any more are left out
    return CheckpointRecord(
        step=step,
        n_bytes=sum(_size(os.path.join(parent, name)) for parent, _, names in found for name in names),
        damage=problem.reason if (problem := damage(folder)) else None,
        parts=tuple(sorted(found[0][1])) if found else (),
    )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        notes.append(f"The configuration {path.name} cannot be read ({error}).")
        return {}
    if not isinstance(config, dict):
        return {}
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException:
        return config
    return _with_references(config, resolved) if isinstance(resolved, dict) else config


def _with_references(raw: object, resolved: Any) -> Any:
    """Return the resolved configuration, but references to environment variables of the run as they were written."""
    if isinstance(raw, dict):
        return {key: _with_references(value, resolved[key]) for key, value in raw.items()}
    return raw if isinstance(raw, str) and "${oc.env:" in raw else resolved


def _read_best(folder: Path, notes: list[str]) -> Best | None:
    try:
        return recorded_best(folder)
    except CheckpointError as error:
        notes.append(f"{error}.")
        return None
