"""Errors that this project raises deliberately.

An error carries data: the received and the expected value, the place and a remedy. Each class also derives from the
nearest standard exception. ``teacher.errors`` has the errors of the teacher service, which does not import this
package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from teacher.common.causes import causes_of
from teacher.common.detailed_error import DetailedError


class GkdError(DetailedError):
    """Base class of the project's errors. ``main_gkd`` prints the message without a traceback and exits with 1."""


@dataclass(eq=False, repr=False)
class ConfigError(GkdError, ValueError):
    """Configuration key, value or combination of values that cannot work.

    Attributes:
        keys: Full names of the keys, such as ``trainer.max_staleness``. Names of options for other commands.
        suggestions: Known keys with a similar name or with the same meaning, for an unknown key.
        parts: Errors that are joined in this one. Empty if it is one error.
    """

    keys: tuple[str, ...] = field(default=(), kw_only=True)
    suggestions: tuple[str, ...] = field(default=(), kw_only=True)
    parts: tuple[ConfigError, ...] = field(default=(), kw_only=True)

    @staticmethod
    def joined(errors: Sequence[ConfigError]) -> ConfigError:
        """Return the only error, or one with the texts and the keys of several."""
        first, *others = errors
        if not others:
            return first
        return first.replaced(
            details=(*first.details, *map(str, others)),
            keys=tuple(dict.fromkeys(key for error in errors for key in error.keys)),
            suggestions=tuple(dict.fromkeys(key for error in errors for key in error.suggestions)),
            parts=tuple(errors),
        )


@dataclass(eq=False, repr=False)
class CustomLossError(ConfigError):
    """Loss function of the user that raises, or whose outputs are invalid.

    Attributes:
        output: The invalid output, such as ``loss_T`` or ``metrics['kl']``. Empty if there are no outputs.
        uids: Uids of the samples with invalid values, in ascending order. Empty if they are not known.
    """

    output: str = field(default="", kw_only=True)
    uids: tuple[int, ...] = field(default=(), kw_only=True)


@dataclass(eq=False, repr=False)
class RunFolderInUse(ConfigError):
    """Run folder that another run has locked.

    Attributes:
        path: The run folder.
        pid: Process id of the driver of the other run. None if it is unknown.
    """

    path: Path | None = field(default=None, kw_only=True)
    pid: int | None = field(default=None, kw_only=True)
    host: str = field(default="", kw_only=True)


@dataclass(eq=False, repr=False)
class DataError(GkdError, ValueError):
    """Data file or row that cannot be used.

    Attributes:
        file: The file or folder.
        row: Position of the row in the data set, or in a file that cannot be read, starting at 0.
        line: Number of the line in the file, starting at 1.
        column: Name of the column. Nested fields are joined by dots.
        existing: Names of the columns or fields that exist. None unless there is no such column.
        uid: Uid of the sample.
        position: Position of a token in the response, starting at 0.
    """

    file: Path | None = field(default=None, kw_only=True)
    row: int | None = field(default=None, kw_only=True)
    line: int | None = field(default=None, kw_only=True)
    column: str = field(default="", kw_only=True)
    existing: tuple[str, ...] | None = field(default=None, kw_only=True)
    uid: int | None = field(default=None, kw_only=True)
    position: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class RewardError(GkdError, RuntimeError):
    """Failure of the reward function: an exception, a timeout, or a result that is not a number.

    Attributes:
        uid: Uid of the sample.
        function: The reward function, such as ``compute_score of reward.py``.
        kind: ``"exception"``, ``"result"`` if the result is no number, ``"timeout"``, or ``"exit"`` of the process.
        exit_status: Exit status of the process, or minus the number of the signal. None if it did not exit by itself.
        failures: Number of failed calls, if the run ends because there are more than ``max_failures``.
    """

    uid: int | None = field(default=None, kw_only=True)
    function: str = field(default="", kw_only=True)
    kind: str = field(default="", kw_only=True)
    exit_status: int | None = field(default=None, kw_only=True)
    failures: int = field(default=0, kw_only=True)


@dataclass(eq=False, repr=False)
class ConversationError(GkdError, RuntimeError):
    """Failure of the environment of a conversation (``rollout.environment``, ``rollout.tools``).

    Attributes:
        uid: Uid of the sample.
        kind: ``"exception"``, ``"result"`` if the result is invalid, ``"timeout"``, or ``"exit"`` of the process.
        failures: Number of failed conversations, if the run ends because there are too many.
    """

    uid: int | None = field(default=None, kw_only=True)
    kind: str = field(default="", kw_only=True)
    failures: int = field(default=0, kw_only=True)


@dataclass(eq=False, repr=False)
class ModelError(GkdError, ValueError):
    """Model folder that is missing, unreadable or not supported.

    Attributes:
        path: The folder or file.
        names: Names of the tensors, of missing files, of the fields of ``config.json``, or of the options of layers.
    """

    path: Path | None = field(default=None, kw_only=True)
    names: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(eq=False, repr=False)
class ResourceError(GkdError, RuntimeError):
    """Cluster without enough resources for the worker pools, or one device assigned to two workers.

    Attributes:
        node: Address or id of the node.
        workers: Labels of the workers, if several are concerned.
        waited_s: Waiting time in seconds, if the resources were awaited.
        variable: Name of the environment variable that has an unusable value.
        keys: Full names of the configuration keys to change.
    """

    node: str = field(default="", kw_only=True)
    waited_s: float = field(default=0.0, kw_only=True)
    workers: tuple[str, ...] = field(default=(), kw_only=True)
    variable: str = field(default="", kw_only=True)
    keys: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(eq=False, repr=False)
class MemoryBudgetError(ResourceError):
    """Phases of a step for which a shared device has too little memory.

    Attributes:
        keys_by_phase: Name of each phase that does not fit -> full names of the configuration keys to change.
    """

    keys_by_phase: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)


@dataclass(eq=False, repr=False)
class WorkerError(GkdError, RuntimeError):
    """Failure of a pool worker.

    Attributes:
        keys: Full names of the configuration keys to change.
        uids: Uids of the samples that caused the failure.
    """

    keys: tuple[str, ...] = field(default=(), kw_only=True)
    uids: tuple[int, ...] = field(default=(), kw_only=True)


@dataclass(eq=False, repr=False)
class WorkerDied(WorkerError):
    """Death of a worker: its process ended, or its engine failed. Another worker can take over its work.

    Attributes:
        process: Name of the process of the engine that died. Empty for the worker's own process.
    """

    process: str = field(default="", kw_only=True)


@dataclass(eq=False, repr=False)
class SecondaryFailure(WorkerError):
    """Failure whose cause another worker reports.

    Attributes:
        origin: Label of the worker that reports the cause. Empty if it is unknown.
    """

    origin: str = field(default="", kw_only=True)


@dataclass(eq=False, repr=False)
class DeadlineError(GkdError, TimeoutError):
    """Missing reply at a deadline.

    Attributes:
        silent: Labels of the workers that did not reply to the driver. They can be replaced.
        answered: Labels of the workers that replied to the driver.
        missing: Names of the processes for which another process of the run has waited in vain.
        waited_s: Waiting time in seconds.
    """

    silent: tuple[str, ...] = field(default=(), kw_only=True)
    answered: tuple[str, ...] = field(default=(), kw_only=True)
    missing: tuple[str, ...] = field(default=(), kw_only=True)
    waited_s: float = field(default=0.0, kw_only=True)


@dataclass(eq=False, repr=False)
class WeightSyncError(GkdError, RuntimeError):
    """Incomplete weight sync. Rollout workers without a complete version reject requests until a complete sync.

    Attributes:
        tensors: Names of the weights, if the failure concerns single weights.
        reported_by: Names of the transport ranks whose report ended the update of the rank that raises the error.
        failures: Errors of the workers that the driver has collected, or of the ranks of one worker.
        invalid: Labels of the rollout workers that have no complete version now.
        first_attempt: Error of the attempt before this one.
    """

    tensors: tuple[str, ...] = field(default=(), kw_only=True)
    reported_by: tuple[str, ...] = field(default=(), kw_only=True)
    failures: tuple[GkdError, ...] = field(default=(), kw_only=True)
    invalid: tuple[str, ...] = field(default=(), kw_only=True)
    first_attempt: WeightSyncError | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class ModelMismatch(WeightSyncError):
    """Rollout engine that computes another model than the actor, in several consecutive steps.

    Attributes:
        sources: Sources of the tokens that differ, such as ``rollout worker 0 of 2``.
        n_steps: Number of consecutive compared steps in which tokens have differed.
    """

    sources: tuple[str, ...] = field(default=(), kw_only=True)
    n_steps: int = field(default=0, kw_only=True)


@dataclass(eq=False, repr=False)
class UnexpectedError(GkdError, RuntimeError):
    """Exception that no part of the project expects; see :mod:`recipe_gkd.diagnostics.unexpected_errors`."""


@dataclass(eq=False, repr=False)
class CheckpointError(GkdError, RuntimeError):
    """Checkpoint that is missing or incomplete, or could not be saved.

    Attributes:
        path: Folder of the checkpoint, or the file in it. The run folder if several checkpoints are concerned.
        ranks: Actor ranks that failed, ascending. Empty if the driver failed.
        tried: Folders of the checkpoints that cannot be used, newest first, if several are concerned.
    """

    path: Path | None = field(default=None, kw_only=True)
    ranks: tuple[int, ...] = field(default=(), kw_only=True)
    tried: tuple[Path, ...] = field(default=(), kw_only=True)


@dataclass(eq=False, repr=False)
class SavesFailed(CheckpointError):
    """Failed saves that end the run.

    Attributes:
        count: Number of failed saves of the run.
        newest: Folder of the newest complete checkpoint of the run. None if there is none.
    """

    count: int = field(default=0, kw_only=True)
    newest: Path | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class CheckpointMismatch(CheckpointError):
    """Complete checkpoint that belongs to another model, other data or other settings.

    Attributes:
        differing: Names of the properties, settings or keys that differ.
    """

    differing: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(eq=False, repr=False)
class VocabularyMismatch(ConfigError):
    """Teacher and student whose ids are not the same tokens.

    Attributes:
        ids: Ids that are missing in one of them or are other tokens. Empty if the tokenizers have nothing in common.
    """

    ids: tuple[int, ...] = field(default=(), kw_only=True)


def find_timeout_error(error: BaseException | None) -> DeadlineError | None:
    """Return the first :class:`DeadlineError` with silent workers among ``error`` and its causes, or None."""
    return next((each for each in causes_of(error) if isinstance(each, DeadlineError) and each.silent), None)
