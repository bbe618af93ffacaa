"""Every teacher of a run behind one call: samples in the order of the answers, and what each teacher did of a step."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Protocol

import numpy as np

from recipe_gkd.config import Config
from recipe_gkd.config.teachers import TEACHER, addresses
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup
from recipe_gkd.teacher_routing.failure_policy import Asked, FailurePolicy
from recipe_gkd.teacher_routing.outages import OutageMonitor
from recipe_gkd.teacher_routing.routes import Routes
from teacher.client import TeacherClient
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

Pair = tuple[Prompt, Response]


class Client(Protocol):
    """What is needed of a :class:`~teacher.client.TeacherClient`."""

    def hello(self, timeout_s: float) -> TeacherInfo: ...

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]: ...


@contextmanager
def open_teachers(config: Config, routes: Routes) -> Iterator[Teachers]:
    """Connect to the teachers that the data names: one client for each address, closed at the end."""
    teacher = config.actor_rollout_ref.teacher
    by_address: dict[tuple[str, int], TeacherClient] = {}
    clients: dict[str, TeacherClient] = {}
    with ExitStack() as opened:
        for name, address in addresses(teacher).items():
            if name not in routes.used:
                continue
            if address not in by_address:
                client = TeacherClient(
                    *address,
                    timeout_s=teacher.timeout_s,
                    auth_dir=teacher.auth_dir,
                    top_k=teacher.top_k,
                    wire_dtype=teacher.wire_dtype,
                )
                by_address[address] = opened.enter_context(client)
            clients[name] = by_address[address]
        yield Teachers(config, routes, clients, OutageMonitor(clients, teacher))


class Teachers:
    """Asks the teacher that a prompt is for about the answers to it, and counts."""

    def __init__(
        self, config: Config, routes: Routes, clients: Mapping[str, Client], outages: OutageMonitor | None = None
    ) -> None:
        """Create it without requests in flight.

        Args:
            clients: Client of each teacher that some row is for, by name.
            outages: Monitor of the same clients; None for no warnings.
        """
        self.clients, self._routes, self._gkd = clients, routes, config.gkd
        self._outages = outages
        self._policy = FailurePolicy(config.actor_rollout_ref.teacher)
        self._skips = config.actor_rollout_ref.teacher.on_failure == "skip_samples"
        self._with_teacher: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)

    def resume(self, n_skipped: int) -> None:
        """Go on counting from what the run has skipped up to here."""
        self._policy.n_skipped = n_skipped

    async def score(self, group: Sequence[Pair], step: int) -> list[Sample]:
        """The teachers' top-k at every response position; of each teacher its own answers are one request.

        Not asked about: an answer without tokens, and one of the data that teaches by its own tokens. Raises what ends
        the run, see :class:`FailurePolicy`.
        """
        by_teacher: defaultdict[int, list[Pair]] = defaultdict(list)
        for prompt, response in group:
            if self._is_asked(prompt, response):
                by_teacher[self._routes.number_of(prompt.row)].append((prompt, response))
        async with FirstErrorTaskGroup() as tasks:
            requests = [
                tasks.start(self._ask(number, request, step))
                for number, pairs in by_teacher.items()
                for request in self._requests(pairs)
            ]
            scored = {sample.prompt.uid: sample for request in requests for sample in await request}
        return [
            scored.get(prompt.uid) or Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(len(response.ids)))
            for prompt, response in group
        ]

    def _requests(self, pairs: list[Pair]) -> list[list[Pair]]:
        """Where failed samples are skipped, each is a request of its own: none is lost through another."""
        return [[pair] for pair in pairs] if self._skips else [pairs]

    def _is_asked(self, prompt: Prompt, response: Response) -> bool:
        return len(response.ids) > 0 and (prompt.reference_ids is None or self._gkd.sft_target == "teacher")

    async def _ask(self, number: int, pairs: Sequence[Pair], step: int) -> list[Sample]:
        name, temperature = self._routes.names[number], self._gkd.distill_temperature
        client = self.clients[name]
        sequences = [
            TeacherSequence(token_ids=np.concatenate([prompt.ids, response.ids]), prompt_len=len(prompt.ids))
            for prompt, response in pairs
        ]

        async def ask(timeout_s: float) -> list[ScoredSequence]:
            request = client.submit(sequences, timeout_s, temperature=temperature)
            if self._outages is None:
                return await asyncio.wrap_future(request)
            return await self._outages.result_of(name, request)

        began = now()
        request = Asked(teacher=name, step=step, uids=[prompt.uid for prompt, _ in pairs])
        responses = await self._policy.responses(ask, request)
        self._with_teacher[step, number].append((began, now()))
        opinions = [None] * len(pairs) if responses is None else responses
        return [
            Sample(
                prompt=prompt,
                response=response,
                teacher=_top_k(opinion) if opinion else TeacherTopK.absent(len(response.ids)),
                teacher_number=number,
                is_skipped=opinion is None,
            )
            for (prompt, response), opinion in zip(pairs, opinions, strict=True)
        ]

    def report(self, samples: Sequence[Sample], step: int, *, before: int) -> dict[str, float]:
        """What each teacher did for the batch of a step. Once a batch, before it is trained on.

        ``before``: samples that were skipped in the steps before.

        Raises the last failure if no sample has an opinion, and there is a distillation loss to have one for.
        """
        asked = [sample for sample in samples if self._is_asked(sample.prompt, sample.response)]
        skipped = sum(sample.is_skipped for sample in asked)
        if skipped and skipped == len(asked) and self._gkd.distill_loss_coef and (error := self._policy.last_error):
            raise type(error)(
                f"step {step}: none of the {skipped} samples of the batch has an answer of its teacher, so there is "
                f"nothing to distil; the last error: {error}. Look after the service and resume from the last "
                f"checkpoint; {TEACHER}.on_failure=wait asks again instead of skipping"
            ) from error
        metrics = {"teacher/skipped_samples": float(skipped), "teacher/skipped_samples_total": float(before + skipped)}
        tokens = [0] * len(self._routes.names)
        for sample in asked:
            tokens[sample.teacher_number] += 0 if sample.is_skipped else len(sample.response.ids)
        for number, name in enumerate(self._routes.names):
            metrics |= {
                f"teacher/{name}/tokens": float(tokens[number]),
                f"teacher/{name}/token_share": tokens[number] / max(sum(tokens), 1),
                f"teacher/{name}/seconds": length_of_union(self._with_teacher.pop((step, number), [])),
            }
        return metrics


def _top_k(response: ScoredSequence) -> TeacherTopK:
    return TeacherTopK(logps_TK=response.topk_logps_TK, ids_TK=response.topk_ids_TK, sampled_logps_T=response.sampled_logps_T)


def length_of_union(intervals: Sequence[tuple[float, float]]) -> float:
    """Of the time that at least one of them covers."""
    total, covered_to = 0.0, -np.inf
    for since, until in sorted(intervals):
        total += max(0.0, until - max(since, covered_to))
        covered_to = max(covered_to, until)
    return float(total)
