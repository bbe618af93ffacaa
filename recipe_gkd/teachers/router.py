"""Routing of samples to the teachers of a run, and metrics of each teacher."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from recipe_gkd.config import Config
from recipe_gkd.config.conditions import has_recorded_references, uses_teacher
from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.support import Support
from recipe_gkd.config.teachers import services
from recipe_gkd.data.parts import parts_of
from recipe_gkd.data.samples import Prompt, Response, Sample, StoredTopK, TeacherTopK
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup
from recipe_gkd.runtime.wait_log import waiting
from recipe_gkd.teachers.backends import TeacherBackend, open_backend, open_recording
from recipe_gkd.teachers.cache.scores import CacheSettings
from recipe_gkd.teachers.direct_requests import DirectRequests
from recipe_gkd.teachers.failure_policy import FailurePolicy, Scores, of_several_requests
from recipe_gkd.teachers.outages import OutageMonitor
from recipe_gkd.teachers.recorded.teacher import RecordedTeacher
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.scoring.clients import ClientDescription, RemoteBackend
from recipe_gkd.teachers.scoring.requests import Requests, TeacherRequest
from teacher.client import TeacherClient
from teacher.errors import TeacherError
from teacher.records import TeacherSequence

Pair = tuple[Prompt, Response]

RECORDING = "(recording)"
"""Name of the recording among the sources. No teacher can have it."""


@contextmanager
def open_teachers(config: Config, routes: Routes) -> Iterator[Teachers]:
    """Create the backends of the teachers that have rows, and close them at the end.

    Teachers with the same address and the same keys share one client.

    Args:
        config: Valid configuration of the run.
        routes: Teacher of each row.

    Raises:
        ConfigError: A user's backend class cannot be used.
        TeacherError: A backend cannot be created as configured.
    """
    teacher = config.actor_rollout_ref.teacher
    by_service: dict[Hashable, TeacherBackend] = {}
    clients: dict[str, TeacherBackend] = {}
    with ExitStack() as stack:
        for name, service in services(teacher).items():
            if name not in routes.used:
                continue
            if service not in by_service:
                by_service[service] = stack.enter_context(closing(open_backend(config, name)))
            clients[name] = by_service[service]
        own = {name: client for name, client in clients.items() if isinstance(client, TeacherClient)}
        recording = None
        if has_recorded_references(config):
            recording = stack.enter_context(closing(open_recording(config)))
        yield Teachers(config, routes, clients, OutageMonitor(own, teacher) if own else None, recording)


class Teachers:
    """The teachers of a run. Each prompt's responses are scored by the teacher of its row.

    Lifecycle::

        with open_teachers(config, routes) as teachers:
            teachers.resume(n_skipped)                     # only in a resumed run
            await teachers.wake()                          # only with teacher.sleep_between_batches, as is sleep()
            samples = await teachers.score(pairs, step)    # concurrently, several times per step
            metrics = teachers.step_metrics(samples, step, before=n_skipped)  # once per step

    Attributes:
        clients: Backend of each teacher that has rows, by name.
        recording: Scores of the reference responses that need no request. None: the teachers score them.
        caches: Cache of each teacher that has one, by name.
        requests: Sender of the requests. At first the driver's process.
    """

    def __init__(
        self,
        config: Config,
        routes: Routes,
        clients: Mapping[str, TeacherBackend],
        outages: OutageMonitor | None = None,
        recording: RecordedTeacher | None = None,
    ) -> None:
        """Create the router without requests in flight.

        Args:
            routes: Teacher of each row.
            clients: Backend of each teacher that has rows, by name.
            outages: Monitor of the same backends, or None for no warnings.
            recording: Scores of the reference responses. None: the teachers score them.
        """
        self.recording = recording
        self._recorded = None if recording is None else DirectRequests(dict.fromkeys(clients, recording))
        self.clients, self._routes, self._gkd, self._config = clients, routes, config.gkd, config
        self.caches: Mapping[str, CacheSettings] = {}
        self._uses_teacher, self._outages = uses_teacher(config.gkd), outages
        self._policy, self._support = FailurePolicy(config.actor_rollout_ref.teacher), Support.of(config)
        self.requests: Requests = DirectRequests(clients)
        self._skips = config.actor_rollout_ref.teacher.on_failure == "skip_samples"
        self._request_times: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def for_data(self, routes: Routes) -> Teachers:
        """Return a router of the same clients for another data set, with its own failure budget.

        Args:
            routes: Teacher of each row of that data set.

        Raises:
            ConfigError: A row is for a teacher without a client, because no row of the training data is for it.
        """
        if absent := [name for name in routes.used if name not in self.clients]:
            raise ConfigError(
                f"trainer.val_kl: rows of the validation data are for teacher {', '.join(absent)}, but no row of the "
                "training data is, so the run does not connect to it",
                keys=("trainer.val_kl",),
                remedy="remove these rows, or set trainer.val_kl=false",
            )
        teachers = Teachers(self._config, routes, self.clients, self._outages, self.recording)
        teachers.requests, teachers.caches = self.requests, self.caches
        return teachers

    def use_caches(self, caches: Mapping[str, CacheSettings]) -> None:
        """Keep the scores of these teachers, and do not request what is kept. Call it before the first request."""
        self.caches, self.requests = caches, DirectRequests(self.clients, caches)

    @property
    def sources(self) -> dict[str, TeacherBackend]:
        """Everything that scores responses, by name: the teachers, and the recording of reference responses."""
        return {**self.clients, **({} if self.recording is None else {RECORDING: self.recording})}

    @property
    def recorded_references(self) -> RecordedTeacher | None:
        """Recording with the scores of the reference responses: beside the teachers, or the only teacher."""
        return next((source for source in self.sources.values() if isinstance(source, RecordedTeacher)), None)

    def client_specs(self) -> dict[str, ClientDescription]:
        """Return what other processes need to send requests to the teachers, by name.

        Empty if the backend runs in the driver's process.
        """
        return {name: client.spec() for name, client in self.clients.items() if isinstance(client, RemoteBackend)}

    def resume(self, n_skipped: int) -> None:
        """Set the number of samples that the run has skipped before its checkpoint. Forget requests after it."""
        self._policy.n_skipped, self._policy.last_error = n_skipped, None
        self._request_times.clear()

    async def sleep(self) -> None:
        """Let the services of all teachers release their devices, at the same time. Other backends are skipped.

        Open requests are finished first. A service that sleeps refuses requests. A failed call is repeated; see
        :meth:`FailurePolicy.repeat`.

        Raises:
            TeacherError: A service did not fall asleep within ``teacher.timeout_s``. The error has its address.
        """
        await self._policy.repeat(partial(self._call_services, TeacherClient.submit_sleep), "sleep")

    async def wake(self, timeout_s: float | None = None) -> None:
        """Let the services of all teachers restore and verify their models, at the same time.

        Args:
            timeout_s: Deadline of a single attempt. None: ``teacher.timeout_s``, and a failed call is repeated; see
                :meth:`FailurePolicy.repeat`.

        Raises:
            TeacherError: A service did not wake up in time, or a worker woke with another model. The error has the
                address and the names of the workers.
        """
        if timeout_s is not None:
            await self._call_services(TeacherClient.submit_wake, timeout_s)
        else:
            await self._policy.repeat(partial(self._call_services, TeacherClient.submit_wake), "wake")

    async def _call_services(self, submit: Callable[[TeacherClient, float], Future[int]], timeout_s: float) -> None:
        """Start one call per address and wait for all. ``details`` of the error has the errors of further services."""
        services = {client.address: client for client in self.clients.values() if isinstance(client, TeacherClient)}
        calls = [asyncio.wrap_future(submit(client, timeout_s)) for client in services.values()]
        with waiting("sleep or wake-up of the teachers", timeout_s, lambda: _unfinished(services, calls)):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not errors:
            return
        first, *others = errors
        if not others or not isinstance(first, TeacherError):
            raise first
        workers = [name for error in errors if isinstance(error, TeacherError) for name in error.workers]
        raise first.replaced(
            workers=tuple(dict.fromkeys(workers)),
            details=(*first.details, *(f"also: {other}" for other in others)),
        ) from first

    async def score(self, pairs: Sequence[Pair], step: int) -> list[Sample]:
        """Return the samples of the pairs, with the teachers' top-k at every response position, in the same order.

        A pair is one sample, or several if its conversation is divided (:func:`~recipe_gkd.data.parts.parts_of`).
        The samples of one teacher are one request. Two kinds of pairs are not scored: empty responses, and reference
        responses with ``gkd.sft_target=data``. Positions from ``gkd.max_loss_position`` on are not scored either. In a
        run without a teacher no pair is scored.

        Args:
            pairs: Prompts with their responses.
            step: Training step, for metrics and messages.

        Raises:
            TeacherError: A request failed, and `FailurePolicy` ends the run.
        """
        parts = [part for pair in pairs for part in parts_of(*pair)]
        by_source: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for index, (prompt, response) in enumerate(parts):
            if self._needs_teacher(prompt, response):
                by_source[self._routes.number_of(prompt.row), self._is_recorded(prompt)].append(index)
        async with FirstErrorTaskGroup() as tasks:
            requests = [
                (request, tasks.start(self._send(number, [parts[i] for i in request], step, is_recorded=is_recorded)))
                for (number, is_recorded), indices in by_source.items()
                for request in self._split(indices)
            ]
            scored = {
                index: sample for request, task in requests for index, sample in zip(request, await task, strict=True)
            }
        return [scored.get(index) or _unscored(*part) for index, part in enumerate(parts)]

    def _split(self, indices: list[int]) -> list[list[int]]:
        """Return one request per sample if failed ones are skipped, so that a failure loses no other sample."""
        return [[index] for index in indices] if self._skips else [indices]

    def _needs_teacher(self, prompt: Prompt, response: Response) -> bool:
        may_score = prompt.reference_ids is None or self._gkd.sft_target == "teacher"
        return self._uses_teacher and may_score and len(response.ids) > 0

    def _is_recorded(self, prompt: Prompt) -> bool:
        return self.recording is not None and prompt.reference_ids is not None

    async def _send(self, number: int, pairs: Sequence[Pair], step: int, *, is_recorded: bool) -> list[Sample]:
        name = self._routes.names[number]
        request = TeacherRequest(
            teacher=name,
            step=step,
            uids=[prompt.uid for prompt, _ in pairs],
            sequences=[self._sequence(prompt, response) for prompt, response in pairs],
            temperature=self._gkd.distill_temperature,
        )

        async def send_request(timeout_s: float) -> Scores:
            if is_recorded and self._recorded is not None:
                return [replace(scores, is_cached=True) for scores in await self._recorded.scores(request, timeout_s)]
            scores = self.requests.scores(request, timeout_s)
            return await (scores if self._outages is None else self._outages.result_of(name, scores))

        began = now()
        scores = await self._policy.send(send_request, request)
        if not is_recorded:
            self._request_times[step, number].append((began, now()))
        results: Sequence[TeacherTopK | StoredTopK | None] = [None] * len(pairs) if scores is None else scores
        return [
            Sample(
                prompt=prompt,
                response=replace(response, student_ids_TJ=None),  # the rows have them
                teacher=_of_response(result, len(response.ids)),
                teacher_number=number,
                is_skipped=result is None,
            )
            for (prompt, response), result in zip(pairs, results, strict=True)
        ]

    def _sequence(self, prompt: Prompt, response: Response) -> TeacherSequence:
        """Return what a teacher scores of a response: the tokens that the loss covers, and the student's ids there."""
        offsets_T, student_ids_TJ = response.offsets_T[: self._gkd.max_loss_position], response.student_ids_TJ
        prompt_len = len(prompt.ids_for_teacher)
        return TeacherSequence(
            token_ids=np.concatenate([prompt.ids_for_teacher, response.sequence_ids[: offsets_T[-1] + 1]]),
            prompt_len=prompt_len,
            scored_ranges=None if response.inserted is None else prompt_len + _ranges(offsets_T),
            support_ids_TJ=None if student_ids_TJ is None else student_ids_TJ[: len(offsets_T)],
            with_top_k=student_ids_TJ is None or self._support.with_top_k,
        )

    def step_metrics(self, samples: Sequence[Sample], step: int, *, before: int) -> dict[str, float]:
        """Return the metrics of each teacher for the batch of a step. Call it once per batch, before the update.

        A run without a teacher has none.

        Args:
            samples: Batch of the step.
            step: Training step.
            before: Samples that were skipped in earlier steps.

        Raises:
            TeacherError: No sample was scored, but the objective has a distillation loss. It is the last failure.
        """
        if not self._uses_teacher:
            return {}
        for_teacher = [sample for sample in samples if self._needs_teacher(sample.prompt, sample.response)]
        skipped = sum(sample.is_skipped for sample in for_teacher)
        none_scored = skipped > 0 and skipped == len(for_teacher)
        if none_scored and self._gkd.distill_loss_coef and (error := self._policy.last_error):
            summary = of_several_requests(
                error,
                f"none of the {skipped} samples of the batch was scored by its teacher, so there is nothing to distill",
                option=f"{TEACHER}.on_failure",
                remedy="check the service and resume from the last checkpoint, or set "
                f"{TEACHER}.on_failure=wait to retry instead of skipping",
            )
            raise summary.replaced(step=step) from error
        metrics = {"teacher/skipped_samples": float(skipped), "teacher/skipped_samples_total": float(before + skipped)}
        if self.recording is not None or self.caches:
            n_cached = sum(sample.teacher.is_cached for sample in for_teacher)
            metrics["teacher/cached_share"] = n_cached / max(len(for_teacher) - skipped, 1)
        tokens = [0] * len(self._routes.names)
        for sample in for_teacher:
            tokens[sample.teacher_number] += sample.teacher.n_scored
        for number, name in enumerate(self._routes.names):
            metrics |= {
                f"teacher/{name}/tokens": float(tokens[number]),
                f"teacher/{name}/token_share": tokens[number] / max(sum(tokens), 1),
                f"teacher/{name}/seconds": length_of_union(self._request_times.pop((step, number), [])),
            }
        return metrics


def _unfinished(addresses: Iterable[str], calls: Sequence[asyncio.Future[int]]) -> dict[str, int]:
    """Return the services whose calls have not returned."""
    return {f"the teacher at {address}": 1 for address, call in zip(addresses, calls, strict=True) if not call.done()}


def _ranges(numbers_T: np.ndarray) -> np.ndarray:
    """Return the ranges [start, end) of consecutive numbers, int32 [R, 2]. The numbers are ascending."""
    (breaks,) = np.nonzero(np.diff(numbers_T) > 1)
    starts, ends = numbers_T[np.append(0, breaks + 1)], numbers_T[np.append(breaks, -1)] + 1
    return np.stack([starts, ends], 1).astype(np.int32)


def _of_response(scores: TeacherTopK | StoredTopK | None, n_tokens: int) -> TeacherTopK | StoredTopK:
    """Return the scores of a response. Positions that were not requested (``gkd.max_loss_position``) are absent."""
    if scores is None:
        return TeacherTopK.absent(n_tokens)
    return scores.extended(n_tokens) if n_tokens > len(scores.sampled_logps_T) else scores


def _unscored(prompt: Prompt, response: Response) -> Sample:
    return Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(len(response.ids)))


def length_of_union(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the total time covered by at least one of the intervals, in seconds."""
    total, covered_until = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return float(total)
