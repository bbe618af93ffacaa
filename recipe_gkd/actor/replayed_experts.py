"""Experts that the rollout engine chose, and the actor's choice in comparison (``rollout.routing_replay``).

Rollout routing replay, R3: the actor computes each token with the experts that computed it in the engine. It weighs
them with its own router (Ma et al. 2025, arXiv:2510.11370), whose gradient passes through these weights.

Shape suffixes: N tokens of a packed row, or this rank's part of them, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor


@dataclass
class RoutingAgreement:
    """Count of the engine's choices that the actor would have made itself.

    Attributes:
        counts: By micro-batch and layer: number of equal choices, and number of the engine's. A recomputation writes
            the same numbers again.
    """

    counts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def next_number(self) -> int:
        """Return the number of the next micro-batch."""
        return next(self._numbers)

    def sums(self, device: torch.device) -> Tensor:
        """Return the number of equal choices and the number of the engine's choices, float64 [2]."""
        if not self.counts:
            return torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack(list(self.counts.values())).sum(0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class ReplayedExperts:
    """Experts of the tokens of a micro-batch.

    Attributes:
        ids: Ids of the experts that the engine chose, int16 [N, layers, X]; -1 where the actor chooses.
        number: Number of the micro-batch.
        agreement: Receives the counts of each layer.
    """

    ids: Tensor
    number: int
    agreement: RoutingAgreement

    def choose(self, layer: int, own_ids_NX: Tensor) -> Tensor:
        """Return the experts to use in a layer, int64 [N, X].

        Args:
            layer: Index of the layer in the model.
            own_ids_NX: Actor's own choice, int64 [N, X].
        """
        ids_NX = self.ids[:, layer].long()
        is_given_N1 = (ids_NX >= 0).all(1, keepdim=True)
        is_same_NX = (ids_NX[:, :, None] == own_ids_NX[:, None]).any(2) & is_given_N1
        n_given = is_given_N1.sum() * ids_NX.size(1)
        self.agreement.counts[self.number, layer] = torch.stack([is_same_NX.sum(), n_given])
        return ids_NX.where(is_given_N1, own_ids_NX)
