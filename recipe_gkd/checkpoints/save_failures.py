"""Limit on the number of failed saves of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from recipe_gkd.checkpoints.state import Best, Progress
from recipe_gkd.errors import CheckpointError, SavesFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FailedSave:
    """Arguments of a save that failed, to repeat it.

    Attributes:
        progress: Progress of the run at the save.
        best: Best record of the run, if the checkpoint was the best one.
    """

    progress: Progress
    best: Best | None


class SaveFailures:
    """Counter of failed saves that ends the run above ``trainer.save_failures_allowed``.

    Attributes:
        count: Number of failed saves since the run started.
        last: The most recent save, if it failed.
        latest_checkpoint: The most recent complete checkpoint of this run, for messages.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.count = 0
        self.last: FailedSave | None = None
        self.latest_checkpoint: Path | None = None

    def record(self, error: CheckpointError, save: FailedSave) -> None:
        """Count a failed save, and log it as a warning.

        Raises:
            SavesFailed: More saves failed than are allowed.
        """
        self.count += 1
        self.last = save
        summary = f"{self.count} failed so far, trainer.save_failures_allowed={self._allowed}; {self.describe_latest()}"
        if self.count > self._allowed:
            raise SavesFailed(
                error.what,
                remedy=error.remedy,
                phase=error.phase,
                worker=error.worker,
                details=(*error.details, f"the run ends because too many saves failed: {summary}"),
                path=error.path,
                ranks=error.ranks,
                count=self.count,
                newest=self.latest_checkpoint,
            ) from error
        log.warning("the checkpoint of step %d could not be saved: %s\n%s", save.progress.step, error, summary)

    def describe_latest(self) -> str:
        """Return a clause with the path of the latest checkpoint."""
        if self.latest_checkpoint is None:
            return "this run has saved none so far"
        return f"the last complete checkpoint is {self.latest_checkpoint}"
