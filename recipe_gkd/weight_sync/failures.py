"""Errors about several workers of a weight sync."""

from __future__ import annotations

from collections.abc import Sequence

from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError


def merge_deadline_errors(errors: Sequence[BaseException]) -> DeadlineError | None:
    """Return one error that names all workers which did not answer, None if no error names any.

    Phase and waiting time come from the first error. A worker that one error names as silent does not count as
    answered by another.
    """
    late = [error for error in errors if isinstance(error, DeadlineError) and error.silent]
    if not late:
        return None
    silent = tuple(dict.fromkeys(label for error in late for label in error.silent))
    merged = late[0].replaced(
        what="; ".join(dict.fromkeys(error.what for error in late)),
        silent=silent,
        answered=tuple(label for error in late for label in error.answered if label not in silent),
    )
    merged.__cause__ = late[0]
    return merged


def as_sync_error(failures: Sequence[GkdError], phase: str) -> WeightSyncError:
    """Return one error for the failures of several workers.

    Args:
        failures: Errors of the workers, at least one. Their order is kept.
        phase: Phase of the sync, if a single failure has none.
    """
    different = list({str(failure): failure for failure in failures}.values())
    if len(different) > 1:
        return WeightSyncError(" | ".join(map(str, different)), phase=phase, failures=tuple(different))
    [failure] = different
    return WeightSyncError(
        failure.what,
        phase=failure.phase or phase,
        worker=failure.worker,
        remedy=failure.remedy,
        details=failure.details,
        failures=(failure,),
    )
