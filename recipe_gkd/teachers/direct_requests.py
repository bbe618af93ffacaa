"""Requests from the driver's own process: of backends that run there, and before the workers have started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from recipe_gkd.data.samples import TeacherTopK
from recipe_gkd.runtime.wait_log import waiting
from recipe_gkd.teachers.backends import TeacherBackend, result_within
from recipe_gkd.teachers.cache.scores import CacheSettings, ScoreCache
from recipe_gkd.teachers.scoring.checks import check_scores
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from recipe_gkd.teachers.scoring.support import rows_of
from teacher.records import ScoredSequence, TeacherSequence


class DirectRequests:
    """Requests whose results are in the driver's memory; see :class:`~recipe_gkd.teachers.scoring.requests.Requests`.

    Args:
        clients: Backend of each teacher, by name.
        caches: Cache of each teacher that has one, by name.
    """

    def __init__(
        self, clients: Mapping[str, TeacherBackend], caches: Mapping[str, CacheSettings] | None = None
    ) -> None:
        self._clients = clients
        self._caches = {name: ScoreCache(settings) for name, settings in (caches or {}).items()}

    async def scores(self, request: TeacherRequest, timeout_s: float) -> list[TeacherTopK]:
        """Return the scores of a request; see :meth:`recipe_gkd.teachers.scoring.requests.Requests.scores`."""
        name, sequences, client = request.teacher, request.sequences, self._clients[request.teacher]

        async def send(sequences: Sequence[TeacherSequence]) -> list[ScoredSequence]:
            future = client.submit(sequences, timeout_s, temperature=request.temperature)
            missing = {f"teacher {name}": len(sequences)}
            with waiting(f"score, step {request.step}", timeout_s, lambda: missing, "samples"):
                scored = await result_within(asyncio.wrap_future(future), timeout_s, name)
            check_scores(name, sequences, scored)
            return scored

        if (cache := self._caches.get(name)) is None:
            return [_with_rows(*pair) for pair in zip(sequences, await send(sequences), strict=True)]
        scored, is_cached = await cache.scores(sequences, send)
        return [_with_rows(*row) for row in zip(sequences, scored, is_cached, strict=True)]


def _with_rows(sequence: TeacherSequence, scored: ScoredSequence, is_cached: bool = False) -> TeacherTopK:
    logps_TK, ids_TK = rows_of(sequence, scored)
    return TeacherTopK(logps_TK=logps_TK, ids_TK=ids_TK, sampled_logps_T=scored.sampled_logps_T, is_cached=is_cached)
