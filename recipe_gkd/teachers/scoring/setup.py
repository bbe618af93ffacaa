"""Scoring workers and memory of the rows as a run configures them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from recipe_gkd.config import Config
from recipe_gkd.config.responses import ResponseCounts
from recipe_gkd.config.support import Support
from recipe_gkd.ray_cluster.object_store import store_bytes, warn_if_small
from recipe_gkd.runtime.worker_variables import worker_variables
from recipe_gkd.teachers.cache.scores import CacheSettings
from recipe_gkd.teachers.scoring.clients import ClientDescription
from recipe_gkd.teachers.scoring.pool import ScoringPool
from teacher.common.sizes import GIB

DEFAULT_SHARE_OF_STORE = 0.5
"""Part of the object store of the fullest node that rows may fill. Shards and responses need memory too."""


def start_scoring(
    config: Config,
    specs: Mapping[str, ClientDescription],
    caches: Mapping[str, CacheSettings],
    nodes: Mapping[str, str],
) -> ScoringPool:
    """Start the scoring workers of a run, without waiting for them.

    Args:
        specs: Client of each teacher, by name.
        caches: Cache of each teacher that has one, by name.
        nodes: Nodes of the actor pool: Ray's id -> address.
    """
    return ScoringPool.start(
        specs,
        nodes,
        support=Support.of(config),
        caches=caches,
        per_node=config.actor_rollout_ref.teacher.scoring_workers_per_node,
        max_restarts=config.trainer.max_worker_restarts,
        env=worker_variables({}, environment=os.environ, extra=config.ray_init.env_vars),
    )


def row_capacity_bytes(scoring: ScoringPool) -> float:
    """Return the bytes of rows with which the object store of the fullest node is full. The homes must be set."""
    stores, shares = store_bytes(scoring.nodes), scoring.node_shares()
    return min((stores[node] / share for node, share in shares.items() if node in stores), default=float("inf"))


def warn_about_memory(config: Config, scoring: ScoringPool) -> None:
    """Log a warning if the object stores cannot hold the rows of a batch of the longest responses."""
    n_tokens = ResponseCounts.most(config).scored * config.data.max_response_length
    batch_bytes = scoring.row_bytes * n_tokens
    warn_if_small(scoring.nodes, scoring.free_shared_memory, batch_bytes, row_capacity_bytes(scoring))


def max_row_bytes(config: Config, scoring: ScoringPool | None) -> int | None:
    """Return the limit of the teachers' rows of batches that are not trained on yet.

    Args:
        scoring: Scoring workers with homes. None if the rows are in the driver's memory.

    Returns:
        ``teacher.max_rows_gb`` in bytes, or else a part of the object stores that have the rows. None: no limit.
    """
    if (limit := config.actor_rollout_ref.teacher.max_rows_gb) is not None:
        return int(limit * GIB)
    return None if scoring is None else int(row_capacity_bytes(scoring) * DEFAULT_SHARE_OF_STORE)
