"""Nodes that receive the teachers' rows: the nodes of the actor ranks that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

NO_HOME = -1
"""Home of rows that are on no node of the actor pool."""


class ActorRank(Protocol):
    """Coordinates of an actor rank; see :class:`recipe_gkd.actor.ranks.RankReport`."""

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank."""

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""


@dataclass(frozen=True)
class Homes:
    """Nodes of the data-parallel ranks.

    The home of a sample depends on its uid alone. So it is known before the teacher is asked, and it is the same if the
    batch is repeated after a restart.

    Attributes:
        nodes: Ray's ids of the nodes.
        of_ranks: Index in ``nodes`` of each data-parallel rank: the node of its last pipeline stage, which is the only
            one that reads rows. If tensor- or context-parallel ranks are on several nodes, the first of them.
    """

    nodes: tuple[str, ...]
    of_ranks: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Sequence[ActorRank], node_ids: Sequence[str]) -> Homes:
        """Return the homes for the ranks of an actor pool.

        Args:
            ranks: Report of each rank.
            node_ids: Ray's id of the node of each rank.
        """
        last_stage = max(rank.pp_rank for rank in ranks)
        node_of: dict[int, str] = {}
        for rank, node in zip(ranks, node_ids, strict=True):
            if rank.pp_rank == last_stage:
                node_of.setdefault(rank.dp_rank, node)
        nodes = tuple(dict.fromkeys(node_of[dp_rank] for dp_rank in sorted(node_of)))
        return cls(nodes, tuple(nodes.index(node_of[dp_rank]) for dp_rank in sorted(node_of)))

    def of_uid(self, uid: int) -> int:
        """Return the index in ``nodes`` of a sample's home. The homes of a batch are in proportion to the ranks."""
        return self.of_ranks[uid % len(self.of_ranks)]
