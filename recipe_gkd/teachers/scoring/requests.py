"""Interface between the routing of samples to teachers and the processes that send the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from recipe_gkd.data.samples import StoredTopK, TeacherTopK
from teacher.records import TeacherSequence


@dataclass(frozen=True, kw_only=True)
class TeacherRequest:
    """Request to one teacher.

    Attributes:
        step: Training step of the samples.
        uids: Indices of the samples in the run.
        sequences: Prompt and response of each sample.
        temperature: Divisor of the teacher's logits.
    """

    teacher: str
    step: int
    uids: Sequence[int]
    sequences: Sequence[TeacherSequence] = field(default=(), repr=False)
    temperature: float = 1.0

    def __str__(self) -> str:
        return f"step {self.step}: teacher {self.teacher}, {len(self.uids)} samples ({', '.join(map(str, self.uids))})"


class Requests(Protocol):
    """Sender of requests to the teachers of a run."""

    async def scores(self, request: TeacherRequest, timeout_s: float) -> Sequence[TeacherTopK | StoredTopK]:
        """Return the scores of all sequences of a request, in their order.

        Canceling the awaiting task cancels the request.

        Args:
            request: Sequences to score.
            timeout_s: Time limit, in seconds.

        Raises:
            TeacherError: The request failed.
            WorkerError: A process that sends requests failed.
        """
        ...
