"""Every error this project raises on purpose.

A message says what was got, what was expected and what to do. Each class is also the standard exception nearest to it,
and takes one string, so that it survives pickling between Ray processes. Raise the class of the room that noticed;
``teacher.errors`` holds those of the teacher service, which does not know this package.
"""


class GkdError(Exception):
    """Base of all of them: ``main_gkd`` prints its message without a traceback and exits with status 1."""


class ConfigError(GkdError, ValueError):
    """A key, a value or a combination of them that cannot work."""


class DataError(GkdError, ValueError):
    """A data file or a row that cannot be used."""


class ModelError(GkdError, ValueError):
    """A model folder that is missing, unreadable, or of a kind that is not supported."""


class ResourceError(GkdError, RuntimeError):
    """The cluster has less than the pools ask for, or two workers got one device."""


class WorkerError(GkdError, RuntimeError):
    """A worker of a pool failed or died; the message names it, the phase and the reason."""


class WorkerDied(WorkerError):
    """The process of a worker is gone; the work that it had can be done by another.

    The driver sets ``label`` and ``rank`` where it notices.
    """

    label: str
    rank: int


class EchoError(WorkerError):
    """A failure whose cause another worker reports."""


class DeadlineError(GkdError, TimeoutError):
    """Something did not answer in time; the message names who, in which phase, and after how long.

    Where workers did not answer the driver, it sets what follows for the diagnosis.
    """

    phase: str
    silent: list[str]
    """Labels of the workers."""
    answered: list[str]
    waited_s: float


class WeightSyncError(GkdError, RuntimeError):
    """Weights did not reach every rollout worker; those that failed refuse to generate until a full sync succeeds."""


class CheckpointError(GkdError, RuntimeError):
    """A checkpoint that is missing, incomplete, or does not fit the run."""
