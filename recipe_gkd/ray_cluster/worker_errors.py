"""Conversion of Ray's errors into errors that name the worker, the phase and the reason.

Nothing here calls Ray.
"""

from __future__ import annotations

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError

from recipe_gkd.errors import GkdError, SecondaryFailure, WorkerDied, WorkerError
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from recipe_gkd.runtime.out_of_memory import ADVICE, advice
from teacher.common.out_of_memory import is_out_of_memory

_MAX_REASON_CHARS = 1000
"""Ray's text about a node without memory lists the processes of the node."""


def unwrap(error: BaseException) -> BaseException:
    """Return the exception that a worker raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def is_death(error: BaseException) -> bool:
    """Return True if Ray reports that a worker's process has ended. Ray's memory monitor raises a separate error."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def root_cause(failures: dict[int, BaseException]) -> tuple[int, BaseException]:
    """Return the rank and the error of the failure that explains the others.

    An error of memory comes first, then errors that a worker raised on purpose, then deaths. Other errors come
    last, because they may only be consequences, such as a broken collective. Equal failures are taken in rank order.
    """

    def order(error: BaseException) -> int:
        cause = unwrap(error)
        if is_out_of_memory(cause):
            return 0
        if isinstance(cause, GkdError):
            return 3 if isinstance(cause, SecondaryFailure) else 1
        return 2 if is_death(cause) else 3

    return min(failures.items(), key=lambda item: order(item[1]))


def to_worker_error(
    error: BaseException, phase: str, pool: str, label: str, location: ActorLocation | None, session: str
) -> WorkerError:
    """Convert an exception that the project did not raise on purpose.

    Args:
        error: The exception, unwrapped.
        phase: Phase of the call.
        pool: Name of the worker's pool.
        location: Location of the worker. None if the exception is not Ray's, so that it cannot be a death.
        session: Folder of Ray's session on each node.

    Returns:
        :class:`WorkerDied` if the worker's process has ended or cannot be reached, else a :class:`WorkerError`.
    """
    if location is None or not (is_death(error) or location.dead):
        details = (_memory_advice(pool, phase),) if is_out_of_memory(error) else ()
        return WorkerError(f"{type(error).__name__}: {error}", phase=phase, worker=label, details=details)
    # ActorUnavailableError does not prove that the process has ended. Ray raises it when a whole node dies.
    event = "died or cannot be reached" if isinstance(error, ActorUnavailableError) else "died"
    return WorkerDied(
        f"its process {event}, on node {location.node_ip or '(none yet)'} {location.node_id[:8]} ({_reason(error)})",
        phase=phase,
        worker=label,
        remedy=f"its log is in {session}/logs on that node{_advice(error, session)}",
    )


def _memory_advice(pool: str, phase: str) -> str:
    """Return the keys to change when a worker of a pool has no memory left in a phase."""
    named = (kind for of_pool, kind in ADVICE if of_pool == pool and phase.startswith(kind))
    return advice(pool, next(named, "start"))


def _reason(error: BaseException) -> str:
    """Return Ray's reason as one sentence.

    In the error of a death, the reason is the last line, followed by a page of advice. In the error of the memory
    monitor, the first lines list the node's memory and the processes that used it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, OutOfMemoryError):
        return " ".join(lines).split(" Refer to the documentation")[0][:_MAX_REASON_CHARS].rstrip(".")
    return lines[-1].split(" Some common causes")[0].rstrip(".")


def _advice(error: BaseException, session: str) -> str:
    if isinstance(error, OutOfMemoryError):
        return "; use fewer or smaller workers on that node, or give it more memory"
    return (
        f", the kernel's log shows if it was killed because memory ran out, and `df {session}` if its log had no space"
    )
