"""Drop a failed update on all rollout workers, and find out which of them are invalid or do not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from recipe_gkd.errors import GkdError, WorkerDied, find_timeout_error
from recipe_gkd.runtime.remote_group import RemoteGroup
from recipe_gkd.weight_sync.failures import merge_deadline_errors
from recipe_gkd.weight_sync.spec import WeightReceiver

_MIN_DROP_TIMEOUT_S = 2.0
_MAX_DROP_TIMEOUT_S = 10.0
"""A worker that drops an update restores the layers that were loaded in part, which takes time."""
_SILENT_DROP_TIMEOUT_S = 1.0
"""Deadline for a worker that did not answer before."""


@dataclass(frozen=True)
class DroppedUpdate:
    """State of the rollout workers after a failed update.

    Attributes:
        invalid: Labels of the workers that have no complete version.
        failed: Errors of the workers that did not drop the update.
        cause: Cause of the failure: the error itself, or, if more workers do not answer now, a :class:`DeadlineError`
            that names all of them.
    """

    invalid: tuple[str, ...]
    failed: tuple[GkdError, ...]
    cause: GkdError

    def __str__(self) -> str:
        """Return a sentence for messages."""
        if self.invalid:
            summary = f"invalid until a complete sync: {', '.join(self.invalid)}"
        else:
            summary = "every worker that replied has a complete version"
        return "; ".join([summary, *map(str, self.failed)])


async def drop_update(
    rollouts: RemoteGroup[WeightReceiver], error: GkdError, *, phase: str, started: float, timeout_s: float
) -> DroppedUpdate:
    """Drop an update on all rollout workers after a failure.

    Args:
        rollouts: Rollout pool.
        error: Failure of the update.
        phase: Phase in which it failed.
        started: Start of the update, by ``time.monotonic()``.
        timeout_s: Deadline of each phase of the sync, in seconds.
    """
    known = find_timeout_error(error)
    # Ray reports a lost node at once, but a call to it may wait until Ray declares the node dead.
    dead = _dead_label(error)
    states = await _drop_on_all(rollouts, [*(known.silent if known else ()), dead], timeout_s)
    failed = tuple(state for label, state in states.items() if isinstance(state, GkdError) and label != dead)
    invalid = tuple(label for label, state in states.items() if isinstance(state, str))
    late = merge_deadline_errors([known, *failed] if known else failed)
    if late is None or (known and set(late.silent) == set(known.silent)):
        return DroppedUpdate(invalid, failed, error)
    late.phase, late.waited_s = known.phase if known else phase, round(time.monotonic() - started, 1)
    answered = [label for label, state in states.items() if not isinstance(state, GkdError)]
    late.answered = tuple(label for label in dict.fromkeys([*late.answered, *answered]) if label not in late.silent)
    late.__cause__ = error
    return DroppedUpdate(invalid, failed, late)


def _dead_label(error: BaseException | None) -> str:
    """Return the label of the worker whose death is the cause of ``error``, empty if there is none."""
    while error is not None and not isinstance(error, WorkerDied):
        error = error.__cause__
    return "" if error is None else error.worker


async def _drop_on_all(
    rollouts: RemoteGroup[WeightReceiver], silent: Sequence[str], timeout_s: float
) -> dict[str, str | GkdError | None]:
    """Call ``drop_weights`` on each worker; return its result or its error by label."""
    drop_s = min(max(_MIN_DROP_TIMEOUT_S, timeout_s / 2), _MAX_DROP_TIMEOUT_S)
    labels = [rollouts.label(rank) for rank in range(len(rollouts))]
    states = await asyncio.gather(
        *(
            rollouts.call_one(
                rank,
                WeightReceiver.drop_weights,
                timeout_s=_SILENT_DROP_TIMEOUT_S if label in silent else drop_s,
                phase="weight sync, drop",
            )
            for rank, label in enumerate(labels)
        ),
        return_exceptions=True,
    )
    by_label: dict[str, str | GkdError | None] = {}
    for label, state in zip(labels, states, strict=True):
        if isinstance(state, BaseException) and not isinstance(state, GkdError):
            raise state
        by_label[label] = state
    return by_label
