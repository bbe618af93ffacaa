"""Division of a batch among the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from recipe_gkd.data.samples import Sample, StoredTopK

Cost = Callable[[int, int], float]
"""Function that returns the computation of an update on a sample, in any unit, from its numbers of input tokens and of
response tokens."""

TOLERANCE = 0.02
"""Fraction by which a rank may exceed the mean cost so that rows of the teacher stay on their node."""


def token_cost(n_tokens: int, n_response_tokens: int) -> float:
    """Return the number of input tokens: the cost if the cost of attention is unknown."""
    return float(n_tokens)


@dataclass(frozen=True)
class Sharding:
    """Division of batches among the data-parallel ranks, balanced by cost.

    Samples are assigned in descending order of cost, each to the rank with the least (Graham 1969, Bounds on
    Multiprocessing Timing Anomalies: the largest shard has at most 4/3 of the optimum). A sample whose teacher rows are
    in the object store of a node goes to a rank of this node, unless that rank would then have more than the mean
    cost plus :data:`TOLERANCE`.

    The shards are a function of lengths and uids, so that a repeated step gives the same sums of gradients.

    Attributes:
        homes: Home of each data-parallel rank; see :class:`recipe_gkd.teachers.scoring.homes.Homes`.
        cost: Cost of a sample.
    """

    homes: Sequence[int]
    cost: Cost = field(default=token_cost)

    def divide(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Return the shard of each rank, in the order of ``samples``. A shard may be empty."""
        costs = [self._cost_of(sample) for sample in samples]
        limit = (1 + TOLERANCE) * sum(costs) / len(self.homes)
        shards: list[list[int]] = [[] for _ in self.homes]
        totals = [0.0] * len(self.homes)
        ranks_at = {home: [rank for rank, at in enumerate(self.homes) if at == home] for home in set(self.homes)}
        for index in sorted(range(len(samples)), key=lambda i: -costs[i]):
            rank = totals.index(min(totals))
            teacher = samples[index].teacher
            if isinstance(teacher, StoredTopK) and teacher.home in ranks_at:
                nearest = min(ranks_at[teacher.home], key=lambda r: totals[r])
                if totals[nearest] + costs[index] <= limit:
                    rank = nearest
            shards[rank].append(index)
            totals[rank] += costs[index]
        return [[samples[index] for index in sorted(shard)] for shard in shards]

    def _cost_of(self, sample: Sample) -> float:
        if not len(sample.response.ids):
            return 0.0  # the actor leaves it out
        return self.cost(sample.n_tokens - 1, len(sample.response.ids))  # the last token is not an input


def shard_batch(samples: Sequence[Sample], dp_size: int) -> list[list[Sample]]:
    """Divide a batch among ``dp_size`` ranks on one node, balanced by tokens; see :class:`Sharding`."""
    return Sharding([0] * dp_size).divide(samples)
