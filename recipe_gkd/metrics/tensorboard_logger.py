"""Metrics as TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TensorBoardLogger:
    """Writer of scalars with the names of the metrics."""

    def __init__(self, folder: Path, completed_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats the steps after completed_steps, so their earlier values are removed.
        self._writer = SummaryWriter(str(folder), purge_step=completed_steps + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write buffered scalars and close the file."""
        self._writer.close()
