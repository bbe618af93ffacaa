"""Requests of a worker and their sequences in the engine.

Requests are not batched: the sequences of all requests are in the engine at the same time, and each engine step takes
as many tokens as fit. Only the settings of the logits are common to all sequences in the engine.

==============  ============================================  ==============  ======================================
request state   event                                         next state      message to the proxy
==============  ============================================  ==============  ======================================
(new)           valid                                         waiting
(new)           invalid                                       (none)          error
waiting         engine is idle, or has the same settings      in the engine
in the engine   all sequences scored                          (none)          score reply
in the engine   a sequence refused by the engine              (none)          error
any             canceled, or connection lost                  (none)
==============  ============================================  ==============  ======================================
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from teacher.engines.base import ScoringEngine
from teacher.errors import TeacherChanged, TeacherError, TeacherRequestError
from teacher.records import ScoredSequence
from teacher.wire import protocol
from teacher.wire.frames import Frame
from teacher.wire.messages import Failure, Score, ScoreReply

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    """A request.

    Attributes:
        request: Received message.
        keys: Engine keys of its sequences, in order.
        scored: Finished sequences by engine key.
    """

    request: Score
    keys: list[int]
    scored: dict[int, ScoredSequence] = field(default_factory=dict)


class WorkerJobs:
    """Open requests of a worker."""

    def __init__(self, engine: ScoringEngine, send: Callable[[list[Frame]], None]) -> None:
        """Start without requests.

        Args:
            engine: Engine that scores the sequences.
            send: Function that sends a message to the proxy.
        """
        self._engine, self._send = engine, send
        self._next_keys = itertools.count()
        self._jobs: dict[int, _Job] = {}  # all open requests by request id
        self._waiting: dict[int, _Job] = {}  # open requests that are not in the engine, in the order of arrival
        self._job_of_key: dict[int, _Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, request: Score) -> None:
        """Accept a request, or send its error. A copy of an open request is ignored."""
        if request.request_id in self._jobs:
            return
        try:
            self._check(request)
        except (TeacherRequestError, TeacherChanged) as error:
            self._send_error(request.request_id, error)
            return
        job = _Job(request, [next(self._next_keys) for _ in request.sequences])
        self._jobs[request.request_id] = self._waiting[request.request_id] = job

    def _check(self, request: Score) -> None:
        info = self._engine.info
        if request.model not in ("", info.identity):
            raise TeacherChanged(
                f"this service serves {info.identity}, but the request is for the previous model of its client: "
                f"{request.model}",
                remedy="start the service with that model again, or begin a new run with this one",
            )
        if request.top_k > info.n_logprobs:
            raise TeacherRequestError(
                f"top_k={request.top_k}, the teacher returns at most {info.n_logprobs}",
                argument="top_k",
                options=("actor_rollout_ref.teacher.top_k", "N_LOGPROBS"),
                remedy="lower actor_rollout_ref.teacher.top_k, or start the teacher with a larger N_LOGPROBS",
            )
        for i, sequence in enumerate(request.sequences):
            try:
                self._engine.check(sequence, request.logits)
            except TeacherRequestError as error:
                raise error.replaced(sequence=i) from None

    def fill_engine(self) -> None:
        """Add the waiting requests to the engine that it may score now.

        A busy engine gets the requests with its settings, up to the first request with others, so that no request is
        overtaken forever. An idle engine gets the settings of the first request, and all requests with them.
        """
        if not self._waiting:
            return

        def has_engine_settings(job: _Job) -> bool:
            return job.request.logits == self._engine.logits

        waiting = list(self._waiting.values())
        if self._engine.has_work():
            startable = list(itertools.takewhile(has_engine_settings, waiting))
        else:
            if not has_engine_settings(waiting[0]):
                self._engine.set_logits(waiting[0].request.logits)
            startable = list(filter(has_engine_settings, waiting))
        for job in startable:
            self._start(job)

    def _start(self, job: _Job) -> None:
        del self._waiting[job.request.request_id]
        for key, sequence in zip(job.keys, job.request.sequences, strict=True):
            self._job_of_key[key] = job
            try:
                self._engine.add(key, sequence)
            except Exception as error:  # engines refuse with errors of any type, which concern this request only
                logger.exception("the engine refused a sequence")
                self.refuse(
                    key, TeacherRequestError(f"the engine refused the request: {type(error).__name__}: {error}")
                )
                return

    def refuse(self, key: int, error: TeacherRequestError) -> None:
        """End the request of a sequence with an error, if it is still open."""
        if (job := self._job_of_key.get(key)) is not None:
            self._forget(job)
            self._send_error(job.request.request_id, error.replaced(sequence=job.keys.index(key)))

    def collect(self, key: int, scored: ScoredSequence) -> int:
        """Store the result of a sequence, and send the reply if it was the last of its request.

        Returns:
            Tokens of the sequence, 0 if its request is not open any more.
        """
        job = self._job_of_key.pop(key, None)
        if job is None:
            return 0
        request = job.request
        job.scored[key] = scored
        if len(job.scored) == len(job.keys):
            del self._jobs[request.request_id]
            results = [job.scored[key].reduced(request.top_k, request.wire_dtype) for key in job.keys]
            self._send(protocol.encode(ScoreReply(request.request_id, results)))
        return len(request.sequences[key - job.keys[0]].token_ids)

    def cancel(self, request_id: int) -> None:
        """Forget a request, if it is open."""
        if (job := self._jobs.get(request_id)) is not None:
            self._forget(job)

    def clear(self) -> None:
        """Forget all requests."""
        for job in list(self._jobs.values()):
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.request.request_id]
        self._waiting.pop(job.request.request_id, None)
        self._engine.discard([key for key in job.keys if self._job_of_key.pop(key, None) is not None])

    def _send_error(self, request_id: int, error: TeacherError) -> None:
        self._send(protocol.encode(Failure(request_id, error)))
