"""Interface of loggers, which user classes implement too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

GLOBAL_STEP = "training/global_step"
"""Metric with the number of the step, which every logger receives."""


@dataclass(frozen=True)
class RunInfo:
    """Properties of a run that its loggers need.

    Attributes:
        folder: Run folder, which exists. It contains ``config.yaml``, the complete configuration.
        project_name: ``trainer.project_name``.
        experiment_name: ``trainer.experiment_name``.
        completed_steps: Number of steps that are completed at the start: 0, or the step that the run resumed from.
        loss_name: Name of the distillation loss, whose values are ``actor/kl_loss``.
    """

    folder: Path
    project_name: str
    experiment_name: str
    completed_steps: int
    last_step: int
    loss_name: str = "loss"


class Logger(Protocol):
    """Destination of metrics.

    A user's class is named by ``trainer.logger=[FILE.py:Name]`` and constructed with a :class:`RunInfo`::

        logger = Name(run_info)            # once, after the workers have started; an exception ends the run
        logger.log(step, metrics)          # after each step
        logger.close()                     # once, when the run ends, also after an error
        logger.fail()                      # optional: after an error, instead of close()

    All calls come from one thread, in this order, so that a slow call does not delay the training. The constructor has
    120 s. At the end the queued steps and ``close`` have 30 s together, 3 s after an error. An exception in ``log`` or
    ``close``, 1000 steps that wait, or a missed deadline at the end do not end the run: they are reported once in the
    run's log with the name of the class, and the logger is not called again.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the complete metrics of a step.

        Args:
            step: Number of the step, starting at 1. With ``trainer.val_before_train`` the first call has the number of
                the step that the run starts from, and only validation metrics. A resumed run repeats the steps after
                its checkpoint.
            metrics: Values by name, such as ``actor/kl_loss``, with ``step`` as ``training/global_step``. Different
                steps may have different names.
        """

    def close(self) -> None:
        """Write everything that is buffered, and release all resources."""
