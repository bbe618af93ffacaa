"""Metrics as TensorBoard scalars."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

MAX_PENDING_STEPS = 1000


class TensorBoardLogger:
    """Writer of scalars with the names of the metrics.

    If the disk fails, the error is logged once, and a new file of events is begun as soon as that is possible. The
    scalars of up to two minutes before the error, which TensorBoard had buffered, may be lost.
    """

    def __init__(self, folder: Path, completed_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open, self._folder, self._completed_steps = SummaryWriter, folder, completed_steps
        self._pending: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=MAX_PENDING_STEPS)
        self._writer: SummaryWriter | None = None
        self._has_warned = self._has_opened = False
        self._write()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        self._pending.append((step, dict(metrics)))
        self._write()

    def close(self) -> None:
        """Write buffered scalars and close the file."""
        self._write()
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._warn(error)

    def _write(self) -> None:
        try:
            if self._writer is None:
                # A resumed run repeats the steps after completed_steps, so their earlier values are removed.
                purge_step = None if self._has_opened else self._completed_steps + 1
                self._writer = self._open(str(self._folder), purge_step=purge_step)
                self._has_opened = True
            while self._pending:
                step, metrics = self._pending[0]
                for name, value in metrics.items():
                    self._writer.add_scalar(name, value, step)
                self._pending.popleft()
        except OSError as error:  # TensorBoard's thread has failed, and its writer with it
            self._warn(error)
            if self._writer is not None:
                with suppress(OSError):
                    self._writer.close()
            self._writer = None

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            log.warning("TensorBoard's files in %s cannot be written: %s; trying again later", self._folder, error)
        self._has_warned = True
