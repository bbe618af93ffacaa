"""Errors about several workers that did not answer the driver."""

from __future__ import annotations

from collections.abc import Sequence

from recipe_gkd.errors import DeadlineError


def merge_deadline_errors(errors: Sequence[BaseException]) -> DeadlineError | None:
    """Return one error that names all workers which did not answer, None if no error names any.

    Phase and waiting time are those of the first error. A worker that one error names as silent does not count as
    answered by another.
    """
    late = [error for error in errors if isinstance(error, DeadlineError) and error.silent]
    if not late:
        return None
    merged = DeadlineError("; ".join(map(str, late)))
    merged.phase, merged.waited_s = late[0].phase, late[0].waited_s
    merged.silent = list(dict.fromkeys(label for error in late for label in error.silent))
    merged.answered = [label for error in late for label in error.answered if label not in merged.silent]
    merged.__cause__ = late[0]
    return merged
