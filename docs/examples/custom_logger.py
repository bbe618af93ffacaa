"""Append selected metrics to a CSV file: trainer.logger=[console,docs/examples/custom_logger.py:CsvLogger]."""

import csv
from collections.abc import Mapping

from recipe_gkd.metrics.loggers.logger_interface import RunInfo

COLUMNS = ("actor/kl_loss", "response_seq_len/average", "timing/step")


class CsvLogger:
    """Logger of one CSV row per step, in ``metrics.csv`` of the run folder."""

    def __init__(self, run: RunInfo) -> None:
        path, kept = run.folder / "metrics.csv", []
        if run.completed_steps and path.exists():  # a resumed run repeats the steps after its checkpoint
            with path.open(newline="") as file:
                kept = [row for row in list(csv.reader(file))[1:] if int(row[0]) <= run.completed_steps]
        self._file = path.open("w", newline="")
        self._rows = csv.writer(self._file)
        self._rows.writerows([["step", *COLUMNS], *kept])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row. A metric that is absent in this step is an empty cell."""
        if "timing/step" in metrics:  # not the validation before the first step
            self._rows.writerow([step, *(metrics.get(name, "") for name in COLUMNS)])
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
