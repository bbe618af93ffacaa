"""Every error this project raises on purpose.

A message says what was got, what was expected and what to do. Each class is also the standard exception nearest to it,
and takes one string, so that it survives pickling between Ray processes. Raise the class of the room that noticed;
``teacher.errors`` holds those of the teacher service, which does not know this package.
"""

from collections.abc import Sequence


class GkdError(Exception):
    """Base of all of them: ``main_gkd`` prints its message without a traceback and exits with status 1."""


class ConfigError(GkdError, ValueError):
    """A key, a value or a combination of them that cannot work."""


class DataError(GkdError, ValueError):
    """A data file or a row that cannot be used."""


class RewardError(GkdError, RuntimeError):
    """The reward function raised, took too long, or returned no number; the message names the sample."""


class ModelError(GkdError, ValueError):
    """A model folder that is missing, unreadable, or of a kind that is not supported."""


class ResourceError(GkdError, RuntimeError):
    """The cluster has less than the pools ask for, or two workers got one device."""


class WorkerError(GkdError, RuntimeError):
    """A worker of a pool failed or died; the message names it, the phase and the reason."""


class WorkerDied(WorkerError):
    """Death of a worker: its process has ended, or its engine has failed. Another worker can do its work."""


class SecondaryFailure(WorkerError):
    """A failure whose cause another worker reports."""


class DeadlineError(GkdError, TimeoutError):
    """Something did not answer in time; the message names who, in which phase, and after how long.

    Where workers did not answer the driver, it sets what follows; see :func:`silence`.
    """

    phase: str = ""
    silent: Sequence[str] = ()
    """Labels of the workers."""
    answered: Sequence[str] = ()
    waited_s: float = 0.0


class WeightSyncError(GkdError, RuntimeError):
    """Weights did not reach every rollout worker; those that failed refuse to generate until a full sync succeeds."""


class UnexpectedError(GkdError, RuntimeError):
    """An exception that no part of the project expects, and perhaps a bug; :mod:`recipe_gkd.diagnostics.unexpected_errors` makes it."""


class CheckpointError(GkdError, RuntimeError):
    """A checkpoint that is missing, incomplete, or does not fit the run."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint that is complete, but belongs to another model, other data or other settings."""


def find_timeout_error(error: BaseException | None) -> DeadlineError | None:
    """The first that names silent workers among this error and those that led to it."""
    seen: list[BaseException] = []  # an error that is raised from itself, or from one that it led to, makes a circle
    while error is not None and error not in seen:
        if isinstance(error, DeadlineError) and error.silent:
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None
