"""Teacher backends: ``actor_rollout_ref.teacher.backend`` selects the client of a teacher.

======================  ==========================================================================
``zmq``                 `TeacherClient` of a teacher service, local or on another machine
``http``                `HttpTeacherClient` of servers started with ``vllm serve`` or SGLang
``recorded``            `RecordedTeacher`, scores on disk
``hf``                  `HfTeacher`, a transformers model in the driver process
``FILE.py:Class``       a class of the user that implements `TeacherBackend`, in a `CustomBackend`
======================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Protocol, TypeVar

from recipe_gkd.config.schema import Config
from recipe_gkd.config.teachers import addresses, auth_dirs, n_connections, urls
from recipe_gkd.model_files import find_model
from recipe_gkd.teachers.custom_backend import CustomBackend
from recipe_gkd.teachers.recorded.teacher import RecordedTeacher
from recipe_gkd.teachers.scoring.checks import check_scores
from teacher.client import TeacherClient
from teacher.errors import TeacherTimeout
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

R = TypeVar("R")

HELLO_TIMEOUT_S = 10.0
"""Deadline of a teacher's first reply. A running service replies within milliseconds, even under load."""
RESULT_MARGIN_S = 5.0
"""Time after a request's deadline in which a backend must complete its future."""


class TeacherBackend(Protocol):
    """Client of one teacher.

    A class named by ``actor_rollout_ref.teacher.backend=FILE.py:Class`` implements these methods; `restrict_ids` is
    optional. It is created in the driver process as ``Class(config.actor_rollout_ref.teacher)``, before any worker
    starts, and closed at the end of the run. The constructor, `hello` and `close` are called in separate threads and
    have deadlines. `submit` is called from the thread of the event loop and must return at once.

    `teacher.client.TeacherClient`, `teacher.client.http.HttpTeacherClient` and `HfTeacher` are implementations.
    """

    def hello(self, timeout_s: float) -> TeacherInfo:
        """Return the model and limits of the teacher.

        Before the training starts, they are compared with the student: tokenizer fingerprint, vocabulary, maximum
        length, number of log-probabilities.

        Args:
            timeout_s: Time limit, in seconds.

        Raises:
            TeacherError: The teacher is not available.
        """
        ...

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        """Start to score sequences and return at once.

        With ``teacher.support=student`` or ``union`` sequences have ``support_ids_TJ``; the results need
        ``support_logps_TJ`` then, and a top k without columns if ``with_top_k`` is False. A class that returns its top
        k only is refused before the training.

        Args:
            sequences: Prompts with their responses.
            timeout_s: Time limit in seconds. The future must be done by then. None selects the backend's default.
            temperature: Divisor of the teacher's logits.

        Returns:
            Future of one result per sequence, in the same order. Errors of the teacher are set as `TeacherTimeout`,
            `TeacherUnavailable` or `TeacherRequestError`, which ``teacher.on_failure`` handles. Any other error,
            also the built-in ``TimeoutError``, ends the run. The future may be canceled.
        """
        ...

    def restrict_ids(self, n_ids: int) -> None:
        """Exclude the ids from ``n_ids`` on from the distributions of all further requests, before the softmax.

        Called before the first request, and only for a student whose vocabulary is the first part of the teacher's
        (``teacher.vocabulary=compatible``). A class without this method cannot be used for such a student.
        """
        ...

    def close(self) -> None:
        """Fail the open requests and free all resources."""
        ...


def hello_now(client: TeacherBackend, config: Config) -> TeacherInfo:
    """Return the model and limits of a teacher before the training.

    A server over HTTP is verified first, for which it scores a sequence after the requests that it has.

    Raises:
        TeacherError: The teacher is not available within `HELLO_TIMEOUT_S`, or over HTTP within the time for the
            verification of a server.
    """
    timeout_s = HELLO_TIMEOUT_S
    if config.actor_rollout_ref.teacher.backend == "http":
        from teacher.client.http import VERIFY_TIMEOUT_S  # imports aiohttp

        timeout_s = VERIFY_TIMEOUT_S
    return client.hello(timeout_s=timeout_s)


def scores_any_sequence(client: TeacherBackend) -> bool:
    """Return False if a backend has the scores of certain sequences only, so that no other one can be tried."""
    return not isinstance(client, RecordedTeacher)


async def result_within(result: Awaitable[R], timeout_s: float, name: str) -> R:
    """Return the result of a request to a backend that may not keep its own deadline.

    The request is canceled if the deadline passes or the caller is canceled.

    Args:
        result: Awaitable of the backend's future.
        timeout_s: Deadline that the backend received, in seconds.

    Raises:
        TeacherTimeout: The future was not done :data:`RESULT_MARGIN_S` after the deadline.
    """
    future = asyncio.ensure_future(result)
    try:
        await asyncio.wait([future], timeout=timeout_s + RESULT_MARGIN_S)
        if not future.done():
            raise timeout_error(name, timeout_s)
        return future.result()
    finally:
        future.cancel()  # without effect if it is done


def timeout_error(name: str, timeout_s: float) -> TeacherTimeout:
    """Return the error of a backend that did not complete a future in time."""
    return TeacherTimeout(
        f"the backend did not complete a request {RESULT_MARGIN_S:g} s after its deadline of {timeout_s:g} s",
        teacher=name,
        stage="submit",
        remedy="complete the future of submit() within timeout_s, with a result or a TeacherTimeout",
    )


def score_now(
    name: str,
    client: TeacherBackend,
    sequences: Sequence[TeacherSequence],
    config: Config,
    timeout_s: float | None = None,
) -> list[ScoredSequence]:
    """Return the scores of sequences before the training. A service that sleeps is woken.

    Args:
        name: Name of the teacher.
        timeout_s: Time limit, in seconds. None: ``teacher.timeout_s``.

    Raises:
        TeacherError: The request failed, or its result is invalid.
    """
    teacher = config.actor_rollout_ref.teacher
    timeout_s = teacher.timeout_s if timeout_s is None else timeout_s
    if teacher.sleep_between_batches and isinstance(client, TeacherClient):
        client.wake(timeout_s)  # a run that was killed has left it asleep
    request = client.submit(sequences, timeout_s, temperature=config.gkd.distill_temperature)
    wait([request], timeout_s + RESULT_MARGIN_S)
    if not request.done():
        request.cancel()
        raise timeout_error(name, timeout_s)
    scored = request.result()
    check_scores(name, sequences, scored)
    return scored


def open_recording(config: Config) -> RecordedTeacher:
    """Open the recording at ``teacher.path``.

    Raises:
        TeacherError: It cannot be used as configured.
    """
    teacher = config.actor_rollout_ref.teacher
    assert teacher.path is not None, "validated with the configuration"
    return RecordedTeacher(Path(teacher.path), top_k=teacher.top_k, temperature=config.gkd.distill_temperature)


def open_backend(config: Config, name: str) -> TeacherBackend:
    """Create the backend of one teacher.

    Args:
        config: Valid configuration of the run.
        name: Name of the teacher, see `recipe_gkd.config.teachers.names`.

    Raises:
        ConfigError: The user's class cannot be loaded or created, or lacks a method.
        TeacherError: The teacher cannot be used as configured.
    """
    teacher = config.actor_rollout_ref.teacher
    match teacher.backend:
        case "zmq":
            auth_dir = auth_dirs(teacher)[name]
            return TeacherClient(
                *addresses(teacher)[name],
                timeout_s=teacher.timeout_s,
                auth_dir=auth_dir,
                top_k=teacher.top_k,
                wire_dtype=teacher.wire_dtype,
                n_connections=n_connections(teacher, auth_dir),
            )
        case "http":
            from teacher.client.http import DEFAULT_CONNECTIONS, Endpoint, HttpClientSpec  # imports aiohttp

            api_key = os.environ.get(teacher.api_key_env or "", "")
            return HttpClientSpec(
                tuple(Endpoint(url, api_key) for url in urls(teacher)[name]),
                tokenizer_path=teacher.model_path or str(find_model(config.actor_rollout_ref.model.path)),
                requires_same_tokenizer=teacher.model_path is None,
                timeout_s=teacher.timeout_s,
                top_k=teacher.top_k,
                served_model_name=teacher.served_model_name,
                n_connections=teacher.n_connections or DEFAULT_CONNECTIONS,
            ).open()
        case "recorded":
            return open_recording(config)
        case "hf":
            from recipe_gkd.teachers.hf_teacher import HfTeacher  # imports torch and transformers

            assert teacher.model_path is not None, "validated with the configuration"
            return HfTeacher(
                teacher.model_path, top_k=teacher.top_k, timeout_s=teacher.timeout_s, device=config.trainer.device
            )
        case spec:
            return CustomBackend(spec, teacher)
