"""Errors that this project raises deliberately.

A message states the received value, the expected value and a remedy. Each class also derives from the nearest
standard exception. It takes one string, so that it can be pickled between Ray processes. ``teacher.errors`` has the
errors of the teacher service, which does not import this package.
"""

from collections.abc import Sequence


class GkdError(Exception):
    """Base class of the project's errors. ``main_gkd`` prints the message without a traceback and exits with 1."""


class ConfigError(GkdError, ValueError):
    """Configuration key, value or combination of values that cannot work."""


class DataError(GkdError, ValueError):
    """Data file or row that cannot be used."""


class RewardError(GkdError, RuntimeError):
    """Failure of the reward function: an exception, a timeout, or a result that is not a number. Names the sample."""


class ModelError(GkdError, ValueError):
    """Model folder that is missing, unreadable or not supported."""


class ResourceError(GkdError, RuntimeError):
    """Lack of resources in the cluster for the worker pools, or one device assigned to two workers."""


class WorkerError(GkdError, RuntimeError):
    """Failure of a pool worker. The message names the worker, the phase and the reason."""


class WorkerDied(WorkerError):
    """Death of a worker: its process ended, or its engine failed. Another worker can take over its work.

    Attributes:
        label: Label of the worker. Empty if the message names several.
    """

    label: str = ""


class SecondaryFailure(WorkerError):
    """Failure whose cause another worker reports."""


class DeadlineError(GkdError, TimeoutError):
    """Missing reply at a deadline. The message names the process, the phase and the waiting time.

    The attributes are set if workers did not reply to the driver.

    Attributes:
        phase: Phase of the run.
        silent: Labels of the workers that did not reply.
        answered: Labels of the workers that replied.
        waited_s: Waiting time in seconds.
    """

    phase: str = ""
    silent: Sequence[str] = ()
    answered: Sequence[str] = ()
    waited_s: float = 0.0


class WeightSyncError(GkdError, RuntimeError):
    """Incomplete weight sync. Rollout workers without a complete version reject requests until a complete sync."""


class UnexpectedError(GkdError, RuntimeError):
    """Exception that no part of the project expects; see :mod:`recipe_gkd.diagnostics.unexpected_errors`."""


class CheckpointError(GkdError, RuntimeError):
    """Checkpoint that is missing or incomplete, or could not be saved."""


class CheckpointMismatch(CheckpointError):
    """Complete checkpoint that belongs to another model, other data or other settings."""


def find_timeout_error(error: BaseException | None) -> DeadlineError | None:
    """Return the first :class:`DeadlineError` with silent workers among ``error`` and its causes, or None."""
    seen: list[BaseException] = []  # a chain of causes can contain a cycle
    while error is not None and error not in seen:
        if isinstance(error, DeadlineError) and error.silent:
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None
