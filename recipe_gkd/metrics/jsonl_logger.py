"""Metrics in a file, with one JSON object per step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipe_gkd.metrics.logger_interface import GLOBAL_STEP


class JsonlLogger:
    """Writer of one JSON object per step.

    The file of a resumed run keeps the lines up to the step that it resumes from. Metrics of a validation before the
    first step are written with step number 0, or added to the line of the step that the run resumes from.
    """

    def __init__(self, path: Path, completed_steps: int) -> None:
        """Open the file and remove the lines after step ``completed_steps``."""
        self._last_line, self._last_line_at = b"", 0  # last kept line and its offset in bytes
        draft = path.with_suffix(".writing")
        with draft.open("wb") as kept:
            for line in _lines_until(path, completed_steps) if completed_steps else ():
                self._last_line, self._last_line_at = line, kept.tell()
                kept.write(line + b"\n")
        draft.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line, or add the metrics to the last kept line if that has the same step."""
        line: dict[str, Any] = {GLOBAL_STEP: step}
        last_line, self._last_line = self._last_line, b""
        if last_line and _step_of(last_line) == step:
            self._file.truncate(self._last_line_at)
            line = json.loads(last_line)
            # Times of this validation are not part of the step, which an earlier start measured.
            metrics = {name: value for name, value in metrics.items() if not name.startswith("timing/")}
        self._file.write(json.dumps({**line, **metrics, GLOBAL_STEP: step}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_until(path: Path, step: int) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as lines:
            yield from (line.rstrip(b"\n") for line in lines if _step_of(line) <= step)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)[GLOBAL_STEP])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # truncated by a crash
