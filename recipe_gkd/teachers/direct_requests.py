"""Requests from the driver's own process: of backends that run there, and before the workers have started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from recipe_gkd.data.samples import TeacherTopK
from recipe_gkd.runtime.wait_log import waiting
from recipe_gkd.teachers.backends import TeacherBackend, result_within
from recipe_gkd.teachers.scoring.checks import check_scores
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from recipe_gkd.teachers.scoring.support import rows_of
from teacher.records import ScoredSequence, TeacherSequence


class DirectRequests:
    """Requests whose results are in the driver's memory; see :class:`~recipe_gkd.teachers.scoring.requests.Requests`.

    Args:
        clients: Backend of each teacher, by name.
    """

    def __init__(self, clients: Mapping[str, TeacherBackend]) -> None:
        self._clients = clients

    async def scores(self, request: TeacherRequest, timeout_s: float) -> list[TeacherTopK]:
        """Return the scores of a request; see :meth:`recipe_gkd.teachers.scoring.requests.Requests.scores`."""
        client = self._clients[request.teacher]
        future = client.submit(request.sequences, timeout_s, temperature=request.temperature)
        missing = {f"teacher {request.teacher}": len(request.uids)}
        with waiting(f"score, step {request.step}", timeout_s, lambda: missing, "samples"):
            scored = await result_within(asyncio.wrap_future(future), timeout_s, request.teacher)
        check_scores(request.teacher, request.sequences, scored)
        return [_with_rows(sequence, result) for sequence, result in zip(request.sequences, scored, strict=True)]


def _with_rows(sequence: TeacherSequence, scored: ScoredSequence) -> TeacherTopK:
    logps_TK, ids_TK = rows_of(sequence, scored)
    return TeacherTopK(logps_TK=logps_TK, ids_TK=ids_TK, sampled_logps_T=scored.sampled_logps_T)
