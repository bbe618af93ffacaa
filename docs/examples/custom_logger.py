"""Append selected metrics to a CSV file: trainer.logger=[console,docs/examples/custom_logger.py:CsvLogger]."""

import csv
from collections.abc import Mapping

from recipe_gkd.metrics.logger_interface import RunInfo

COLUMNS = ("actor/kl_loss", "response_seq_len/average", "timing/step")


class CsvLogger:
    """Logger of one CSV row per step, in ``metrics.csv`` of the run folder."""

    def __init__(self, run: RunInfo) -> None:
        self._file = (run.folder / "metrics.csv").open("a", newline="")
        self._rows = csv.writer(self._file)
        if run.first_step == 0:
            self._rows.writerow(["step", *COLUMNS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row. A metric that is absent in this step is an empty cell."""
        self._rows.writerow([step, *(metrics.get(name, "") for name in COLUMNS)])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
