"""Adapter around a teacher backend from a user's file: ``actor_rollout_ref.teacher.backend=FILE.py:Class``.

Errors of the class are reported as `BackendError` or `ConfigError` with the file and the class. `TeacherError` and its
subclasses pass unchanged.
"""

from __future__ import annotations

import inspect
import logging
import numbers
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from recipe_gkd.config.backend_class import load_backend_class
from recipe_gkd.config.keys import BACKEND, key_name
from recipe_gkd.config.schema import TeacherConfig
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.threads import run_until
from teacher.errors import TeacherError, TeacherProtocolError, TeacherTimeout
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

R = TypeVar("R")

log = logging.getLogger(__name__)

CREATE_TIMEOUT_S = 1800.0
"""Deadline of the constructor, which may load a large model from a slow disk."""
CLOSE_TIMEOUT_S = 30.0
HELLO_MARGIN_S = 5.0
"""Time after the time limit of ``hello`` in which it must return."""

_REMEDY = "correct the class"
_FUTURE = "the future of submit"
_VOCABULARY_KEY = key_name(lambda config: config.actor_rollout_ref.teacher.vocabulary)
_TEXT_FIELDS = ("model_name", "tokenizer_fingerprint", "engine")
_INT_FIELDS = ("vocab_size", "n_tokens", "max_model_len", "n_logprobs", "protocol_version", "n_workers")


@dataclass(eq=False, repr=False)
class BackendError(TeacherError):
    """Exception or wrong result of a user's class. An exception is the cause.

    Attributes:
        method: Method that failed.
        line: Line of the user's file in which the exception was raised, starting at 1.
        entries: Fields of the returned `TeacherInfo` that have a wrong type.
    """

    method: str = field(default="", kw_only=True)
    line: int | None = field(default=None, kw_only=True)
    entries: tuple[str, ...] = field(default=(), kw_only=True)


class CustomBackend:
    """A teacher backend of the user whose calls have deadlines and whose results are checked.

    The constructor, ``hello`` and ``close`` of the class run in daemon threads, so that one of them that hangs does not
    keep the run alive. ``submit`` is called from the thread of the event loop.

    Lifecycle::

        backend = CustomBackend("my_teacher.py:MyTeacher", config.actor_rollout_ref.teacher)  # constructs the class
        info = backend.hello(timeout_s=10.0)
        scored = backend.submit(sequences, 60.0, temperature=1.0).result()
        backend.close()
    """

    def __init__(self, spec: str, teacher: TeacherConfig) -> None:
        """Load and construct the class.

        Args:
            spec: ``FILE.py:Class``.
            teacher: Argument of the constructor.

        Raises:
            ConfigError: The class cannot be used, or its constructor failed.
            TeacherError: The constructor raised it, or did not return within :data:`CREATE_TIMEOUT_S`.
        """
        self.n_ids = 0
        self._label = f"{BACKEND}={spec}"
        backend_class = load_backend_class(spec)
        self._file = getattr(sys.modules.get(backend_class.__module__), "__file__", None)
        outcome = _outcome_within(lambda: backend_class(teacher), CREATE_TIMEOUT_S)
        if outcome is None:
            raise self._late("the constructor", CREATE_TIMEOUT_S)
        if isinstance(outcome, BaseException):
            if isinstance(outcome, ConfigError | TeacherError):
                raise outcome
            failure = self._failure("the constructor", outcome)
            raise ConfigError(failure.what, keys=(BACKEND,), remedy=failure.remedy) from outcome
        [self._backend] = outcome

    def hello(self, timeout_s: float) -> TeacherInfo:
        """Return the model and limits of the teacher.

        Args:
            timeout_s: Time limit, in seconds.

        Raises:
            TeacherError: The method failed, returned something else than a `TeacherInfo`, or did not return in time.
        """
        limit_s = timeout_s + HELLO_MARGIN_S
        outcome = _outcome_within(lambda: self._backend.hello(timeout_s=timeout_s), limit_s)
        if outcome is None:
            raise self._late("hello", limit_s)
        if isinstance(outcome, BaseException):
            raise self._as_teacher_error("hello", outcome)
        [info] = outcome
        self._check_info(info)
        return info

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        """Start to score sequences and return a future of the checked results. Canceling it cancels the user's future.

        Args:
            sequences: Prompts with their responses.
            timeout_s: Time limit in seconds. None selects the backend's default.
            temperature: Divisor of the teacher's logits.

        Raises:
            TeacherError: The method failed, or did not return a `concurrent.futures.Future`.
        """
        try:
            inner = self._backend.submit(sequences, timeout_s, temperature=temperature)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's method can raise any exception
            raise self._as_teacher_error("submit", error)  # noqa: B904 - it sets the cause itself
        if not isinstance(inner, Future):
            if inspect.iscoroutine(inner):
                inner.close()
            raise self._error("submit", f"returned {_type_name(inner)}, expected a concurrent.futures.Future")
        checked: Future[list[ScoredSequence]] = Future()
        checked.add_done_callback(lambda future: future.cancelled() and inner.cancel())
        inner.add_done_callback(lambda future: self._pass_on(future, sequences, checked))
        return checked

    def restrict_ids(self, n_ids: int) -> None:
        """Exclude the ids from ``n_ids`` on from the distributions.

        Raises:
            ConfigError: The class has no such method.
            TeacherError: The method failed.
        """
        restrict = getattr(self._backend, "restrict_ids", None)
        if restrict is None:
            raise ConfigError(
                f"{self._label} with {_VOCABULARY_KEY}=compatible: the class has no restrict_ids(n_ids), which "
                "excludes the ids that the student does not have",
                keys=(BACKEND, _VOCABULARY_KEY),
                remedy="define it, or use a teacher with the student's vocabulary",
            )
        try:
            restrict(n_ids)
            self.n_ids = n_ids
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's method can raise any exception
            raise self._as_teacher_error("restrict_ids", error)  # noqa: B904 - it sets the cause itself

    def close(self) -> None:
        """Close the user's backend. A failure is logged as a warning, because the run has ended."""
        outcome = _outcome_within(self._backend.close, CLOSE_TIMEOUT_S)
        if outcome is None:
            log.warning("%s", self._late("close", CLOSE_TIMEOUT_S))
        elif isinstance(outcome, BaseException):
            log.warning("%s", self._failure("close", outcome), exc_info=outcome)

    def _pass_on(
        self, inner: Future[Any], sequences: Sequence[TeacherSequence], checked: Future[list[ScoredSequence]]
    ) -> None:
        """Set the checked result or the error of the user's future on the future of the caller."""
        if not checked.set_running_or_notify_cancel():
            return
        try:
            if inner.cancelled():
                raise self._error(_FUTURE, "was canceled by the backend")
            scored = inner.result()
            check_results(self._label, sequences, scored)
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            checked.set_exception(self._as_teacher_error(_FUTURE, error))
        else:
            checked.set_result(list(scored))

    def _check_info(self, info: object) -> None:
        if not isinstance(info, TeacherInfo):
            raise self._error("hello", f"returned {_type_name(info)}, expected a teacher.TeacherInfo")
        ids = info.eos_token_ids
        is_valid = {name: isinstance(getattr(info, name), str) for name in _TEXT_FIELDS}
        is_valid |= {name: isinstance(getattr(info, name), numbers.Integral) for name in _INT_FIELDS}
        is_valid["eos_token_ids"] = isinstance(ids, tuple | list) and all(
            isinstance(token, numbers.Integral) for token in ids
        )
        if invalid := tuple(name for name, valid in is_valid.items() if not valid):
            shown = ", ".join(f"{name}={getattr(info, name)!r:.100}" for name in invalid)
            error = self._error("hello", f"returned a TeacherInfo with {shown}, expected the types of its fields")
            raise error.replaced(entries=invalid)

    def _as_teacher_error(self, method: str, error: BaseException) -> TeacherError:
        if isinstance(error, TeacherError):
            return error
        wrapped = self._failure(method, error)
        wrapped.__cause__ = error
        return wrapped

    def _failure(self, method: str, error: BaseException) -> BackendError:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == self._file]
        line = frames[-1].lineno if frames else None
        place = f" in line {line}" if line is not None else ""
        raised = self._error(method, f"raised {type(error).__name__}{place}: {error}")
        return raised.replaced(line=line, remedy=_REMEDY)

    def _error(self, method: str, problem: str) -> BackendError:
        return BackendError(f"{self._label}: {method} {problem}", options=(BACKEND,), method=method)

    def _late(self, method: str, timeout_s: float) -> TeacherTimeout:
        return TeacherTimeout(
            f"{self._label}: {method} did not return within {timeout_s:g} s",
            options=(BACKEND,),
            stage=method,
            remedy=_REMEDY,
        )


def check_results(label: str, sequences: Sequence[TeacherSequence], scored: object) -> None:
    """Check the results of a custom backend: records of numpy arrays, their dtypes, and distinct ids in each row.

    `recipe_gkd.teachers.scoring.checks.check_scores` checks number and shapes, for all backends.

    Args:
        label: Key and class, for the error.
        scored: Result of the user's future.

    Raises:
        TeacherProtocolError: A result cannot be used. ``sequence`` and ``entry``, the array, of the error are set.
    """
    if not isinstance(scored, list | tuple):
        raise TeacherProtocolError(
            f"{label}: the future of submit has a result of type {_type_name(scored)}, expected a list of "
            f"{len(sequences)} teacher.ScoredSequence",
            options=(BACKEND,),
        )
    for i, result in enumerate(scored):
        kinds = {"topk_logps_TK": np.floating, "topk_ids_TK": np.integer, "sampled_logps_T": np.floating}
        if getattr(result, "support_logps_TJ", None) is not None:
            kinds["support_logps_TJ"] = np.floating
        for name, kind in kinds.items():
            array = getattr(result, name, None)
            if not (isinstance(array, np.ndarray) and np.issubdtype(array.dtype, kind)):
                found = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else f"type {_type_name(array)}"
                found = found if hasattr(result, name) else f"no such attribute in a {_type_name(result)}"
                raise TeacherProtocolError(
                    f"{label}: {name} has {found}, expected a numpy array of a {kind.__name__} dtype",
                    sequence=i,
                    entry=name,
                    options=(BACKEND,),
                )
        _check_distinct(label, i, result.topk_ids_TK)


def _check_distinct(label: str, i: int, ids_TK: np.ndarray) -> None:
    """Check that no id occurs twice in a row. Negative ids are missing entries."""
    if ids_TK.ndim != 2:
        return  # `check_scores` reports the shape
    sorted_TK = np.sort(ids_TK, axis=1)
    repeated_TK = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
    if repeated_TK.any():
        row, column = np.argwhere(repeated_TK)[0]
        raise TeacherProtocolError(
            f"{label}: topk_ids_TK has the id {sorted_TK[row, column]} more than once in row {row}, expected distinct "
            "ids in each row",
            sequence=i,
            entry="topk_ids_TK",
            options=(BACKEND,),
        )


def _outcome_within(function: Callable[[], R], timeout_s: float) -> tuple[R] | BaseException | None:
    """Return the result of a call as a 1-tuple, its exception, or None if it has not returned within ``timeout_s``."""

    def attempt() -> tuple[R] | BaseException:
        try:
            return (function(),)
        except BaseException as error:  # noqa: BLE001 - the caller reports it
            return error

    [outcome] = run_until(time.monotonic() + timeout_s, [attempt])
    return outcome


def _type_name(value: object) -> str:
    return type(value).__name__
