"""KL divergences between student and teacher on the responses of a validation (``trainer.val_kl``).

Metrics for each data source, means over the scored tokens of its responses, in nats::

    val/<data_source>/kl            forward KL(teacher || student)
    val/<data_source>/reverse_kl    reverse KL(student || teacher)

Ids outside the support (``teacher.support``) are one outcome, so both are lower bounds, which cannot be compared
between supports. They do not depend on the loss of the run.
Both models have ``gkd.distill_temperature``, and positions from ``gkd.max_loss_position`` on are left out.

Shape suffixes: N samples, D = 2 divergences (forward, reverse).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup

FORWARD, REVERSE = "kl", "reverse_kl"

Pair = tuple[Prompt, Response]
Score = Callable[[Sequence[Pair]], Coroutine[Any, Any, list[Sample]]]
SumKl = Callable[[Sequence[Sample]], Awaitable[Sequence[Mapping[int, tuple[float, float]]]]]


@dataclass(frozen=True, kw_only=True)
class KlStages:
    """Functions that do the work.

    Attributes:
        score: Returns the samples of a group of responses, scored by their teachers. Groups are scored concurrently.
        sum_kl: Returns the results of :meth:`~recipe_gkd.actor.student_actor.StudentActor.kl_sums` of all actor ranks.
    """

    score: Score
    sum_kl: SumKl


@dataclass(frozen=True)
class ResponseKl:
    """KL divergences of each response.

    Attributes:
        n_tokens_N: Number of scored tokens, int64.
        sums_ND: Sums over these tokens of forward and reverse KL in nats, float64.
    """

    n_tokens_N: np.ndarray
    sums_ND: np.ndarray

    def forward_per_response(self) -> list[float | None]:
        """Return the mean forward KL of each response, None for responses without scored tokens."""
        return [
            float(forward / n) if n else None for n, forward in zip(self.n_tokens_N, self.sums_ND[:, 0], strict=True)
        ]

    def metrics(self, sources_N: np.ndarray) -> dict[str, float]:
        """Return the metrics of each data source. A source without scored tokens has none.

        Args:
            sources_N: Data source of each response.
        """
        found: dict[str, float] = {}
        for source in np.unique(sources_N):
            rows = sources_N == source
            if n_tokens := int(self.n_tokens_N[rows].sum()):
                forward, reverse = self.sums_ND[rows].sum(0) / n_tokens
                found |= {f"val/{source}/{FORWARD}": float(forward), f"val/{source}/{REVERSE}": float(reverse)}
        return found


async def measure_kl(pairs: Sequence[Pair], stages: KlStages, *, group_size: int, chunk_size: int) -> ResponseKl:
    """Return the KL divergences of responses.

    Args:
        pairs: Prompts with their responses.
        stages: Functions that do the work.
        group_size: Number of responses in a request to the teacher.
        chunk_size: Number of responses whose teacher scores are in memory at a time.
    """
    n_tokens = {prompt.uid: 0 for prompt, _ in pairs}
    totals = {prompt.uid: np.zeros(2) for prompt, _ in pairs}
    for start in range(0, len(pairs), chunk_size):
        chunk = pairs[start : start + chunk_size]
        async with FirstErrorTaskGroup() as tasks:
            groups = [
                tasks.start(stages.score(chunk[first : first + group_size]))
                for first in range(0, len(chunk), group_size)
            ]
            samples = [sample for group in groups for sample in await group]
        for of_rank in await stages.sum_kl(samples):
            for uid, sums in of_rank.items():
                totals[uid] += sums
        for sample in samples:
            n_tokens[sample.prompt.uid] += sample.teacher.n_scored
        del samples, groups  # the rows, before the rows of the next chunk arrive
    return ResponseKl(np.array(list(n_tokens.values()), np.int64), np.array(list(totals.values())).reshape(-1, 2))
