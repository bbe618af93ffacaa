"""KL divergences between student and teacher on the responses of a validation (``trainer.val_kl``).

Metrics for each data source, means over the scored tokens of its responses, in nats::

    val/<data_source>/kl            forward KL(teacher || student)
    val/<data_source>/reverse_kl    reverse KL(student || teacher)

Ids outside the support (``teacher.support``) are one outcome, so both are lower bounds, which cannot be compared
between supports. They do not depend on the loss of the run.
Both models have ``gkd.distill_temperature``, and positions from ``gkd.max_loss_position`` on are left out.

Shape suffixes: N responses, T tokens of a response, D = 2 divergences (forward, reverse).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup

if TYPE_CHECKING:
    from recipe_gkd.actor.objective.token_kl import TokenKl

FORWARD, REVERSE = "kl", "reverse_kl"

Pair = tuple[Prompt, Response]


@dataclass(frozen=True, kw_only=True)
class KlStages:
    """Functions that do the work.

    Attributes:
        score: Returns the samples of a group of responses, scored by their teachers. Groups are scored concurrently.
        token_kl: Returns the results of :meth:`~recipe_gkd.actor.student_actor.StudentActor.token_kl` of all actor
            ranks.
    """

    score: Callable[[Sequence[Pair]], Coroutine[Any, Any, list[Sample]]]
    token_kl: Callable[[Sequence[Sample]], Awaitable[Sequence[TokenKl]]]


@dataclass(frozen=True)
class ResponseKl:
    """KL divergences at the tokens of each response.

    Attributes:
        kl_TD: Forward and reverse KL in nats, float32 [T, D] for each response.
        is_scored_T: True for the tokens that a teacher has scored, bool [T] for each response.
    """

    kl_TD: Sequence[np.ndarray]
    is_scored_T: Sequence[np.ndarray]

    @cached_property
    def n_tokens_N(self) -> np.ndarray:
        """Number of scored tokens of each response, int64."""
        return np.array([scored_T.sum() for scored_T in self.is_scored_T], np.int64)

    @cached_property
    def sums_ND(self) -> np.ndarray:
        """Sums over the scored tokens of each response, float64."""
        of_responses = zip(self.kl_TD, self.is_scored_T, strict=True)
        sums = [kl_TD[scored_T].sum(0, dtype=np.float64) for kl_TD, scored_T in of_responses]
        return np.array(sums, np.float64).reshape(-1, 2)

    def forward_per_response(self) -> list[float | None]:
        """Return the mean forward KL of each response, None for responses without scored tokens."""
        return [
            float(forward / n) if n else None for n, forward in zip(self.n_tokens_N, self.sums_ND[:, 0], strict=True)
        ]

    def forward_per_token(self) -> list[np.ndarray]:
        """Return the forward KL at each token, float32 [T] for each response; NaN if no teacher has scored it."""
        of_responses = zip(self.kl_TD, self.is_scored_T, strict=True)
        return [np.where(scored_T, kl_TD[:, 0], np.float32(np.nan)) for kl_TD, scored_T in of_responses]

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
    kl_TD = {prompt.uid: np.zeros((len(response.ids), 2), np.float32) for prompt, response in pairs}
    is_scored_T = {prompt.uid: np.zeros(len(response.ids), np.bool_) for prompt, response in pairs}
    for start in range(0, len(pairs), chunk_size):
        chunk = pairs[start : start + chunk_size]
        async with FirstErrorTaskGroup() as tasks:
            groups = [
                tasks.start(stages.score(chunk[first : first + group_size]))
                for first in range(0, len(chunk), group_size)
            ]
            samples = [sample for group in groups for sample in await group]
        for of_rank in await stages.token_kl(samples):
            order_T = np.argsort(of_rank.uids_T, kind="stable")
            uids, starts = np.unique(of_rank.uids_T[order_T], return_index=True)
            for uid, rows_T in zip(uids.tolist(), np.split(order_T, starts)[1:], strict=True):
                kl_TD[uid][of_rank.positions_T[rows_T]] = of_rank.kl_TD[rows_T]
                is_scored_T[uid][of_rank.positions_T[rows_T]] = True
        del samples, groups  # the rows, before the rows of the next chunk arrive
    return ResponseKl(list(kl_TD.values()), list(is_scored_T.values()))
