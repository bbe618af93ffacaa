"""Metrics in a file, with one JSON object per step."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_gkd.metrics.loggers.line_file import LineFile
from recipe_gkd.metrics.loggers.logger_interface import GLOBAL_STEP
from recipe_gkd.runtime.previous_files import keep_previous

log = logging.getLogger(__name__)


class JsonlLogger:
    """Writer of one JSON object per step. A disk that is full ends nothing; see :class:`LineFile`.

    The file of a resumed run keeps the lines before the first one of a later step than it resumes from. Metrics of a
    validation before the first step are written with step number 0, or added to the line of the step that the run
    resumes from.
    """

    def __init__(self, path: Path, completed_steps: int) -> None:
        """Open the file, and remove the lines after step ``completed_steps``. 0: rename an earlier file."""
        if not completed_steps:
            try:
                keep_previous(path)
            except OSError as error:
                log.warning("%s of an earlier run is overwritten, because it cannot be renamed: %s", path, error)
        self._file = LineFile(path, lambda line: bool(completed_steps) and _step_of(line) <= completed_steps)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line, or add the metrics to the last kept line if that has the same step."""
        line: dict[str, Any] = {GLOBAL_STEP: step}
        last_line = self._file.last_kept
        is_same = bool(last_line) and _step_of(last_line) == step
        if is_same:
            line = json.loads(last_line)
            # Times of this validation are not part of the step, which an earlier start measured.
            metrics = {name: value for name, value in metrics.items() if not name.startswith("timing/")}
        text = json.dumps({**line, **metrics, GLOBAL_STEP: step})
        self._file.append(text.encode(), instead_of_last=is_same)

    def close(self) -> None:
        """Write the lines that wait for the disk, and close the file."""
        self._file.close()


def _step_of(line: bytes) -> float:
    """Return the step of a line; minus infinity for a damaged one, after which readable lines may follow."""
    try:
        return float(json.loads(line)[GLOBAL_STEP])
    except (ValueError, KeyError, TypeError):
        return -math.inf
