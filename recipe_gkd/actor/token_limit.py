"""Smaller micro-batches after running out of memory, for ``trainer.oom=split``: the limit of tokens, and its agreement.

Every attempt of an update has one vote, which is the only communication between the ranks from the plan of the
micro-batches to the reduction of the gradient::

    vote = Vote(layout, device, limit)
    # a rank whose backward passes are complete:       a rank that ran out of memory:
    vote.succeed()    # before its gradient is reduced  vote.fail(next_limit(groups, limit))

``succeed`` raises :class:`AttemptFailed` if another rank failed. Then no rank has reduced its gradient, and all repeat
the update with the same limit, or raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from recipe_gkd.actor.ranks import Layout
from recipe_gkd.config.schema import ActorConfig
from recipe_gkd.data.samples import Sample


class AttemptFailed(Exception):
    """Another rank ran out of memory; this rank abandons its attempt. It never leaves the updater."""


@dataclass
class TokenLimit:
    """Maximum number of tokens per micro-batch in this run.

    Attributes:
        lowered: Limit after running out of memory; None if memory sufficed.
        n_splits: Number of attempts that failed and were repeated.
    """

    lowered: int | None = None
    n_splits: int = 0

    def applied_to(self, config: ActorConfig) -> ActorConfig:
        """Return the configuration with the limit, if that is lower than the configured one."""
        if self.lowered is None or self.lowered >= config.max_token_len:
            return config
        return replace(config, max_token_len=self.lowered)


class Vote:
    """Agreement of all ranks on the result of one attempt. See the module for its use.

    Args:
        layout: Coordinates of this rank.
        device: Device of the collective.
        limit: Tokens per micro-batch of this attempt.

    Attributes:
        is_done: True if all ranks have voted. Later failures cannot be repeated, because other ranks wait in the
            reduction of the gradient.
        limit: Limit for the next attempt. 0 if a rank that failed cannot divide its micro-batches any more.
        failed_rank: First rank that failed; None if the attempt succeeded.
    """

    def __init__(self, layout: Layout, device: torch.device, limit: int) -> None:
        self._layout, self._device = layout, device
        self.is_done, self.limit = False, limit
        self.failed_rank: int | None = None

    def succeed(self) -> None:
        """Vote for success. Collective.

        Raises:
            AttemptFailed: Another rank failed.
        """
        self._reduce(self.limit, self._layout.world_size)
        if self.failed_rank is not None:
            raise AttemptFailed

    def fail(self, limit: int) -> None:
        """Vote for a repetition with ``limit``. Collective."""
        self._reduce(limit, self._layout.rank)

    def _reduce(self, limit: int, failed_rank: int) -> None:
        values = torch.tensor([limit, failed_rank], device=self._device)
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
        self.limit, first = values.tolist()
        self.failed_rank = first if first < self._layout.world_size else None
        self.is_done = True


def next_limit(groups: Sequence[Sequence[Sample]], limit: int) -> int:
    """Return a limit with which the micro-batches of a rank are smaller: ``limit`` halved until it has an effect.

    Args:
        groups: Samples of each micro-batch of this rank, divided by ``limit``.
        limit: Current maximum number of tokens.

    Returns:
        The new limit, or 0 if each micro-batch has only one sample.
    """
    largest = max((sum(sample.n_tokens - 1 for sample in group) for group in groups if len(group) > 1), default=0)
    while limit >= max(largest, 1):
        limit //= 2
    return limit if largest else 0
