"""Start the workers of both pools at the same time, connect them, and end them."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.config import Config
from recipe_gkd.errors import ResourceError
from recipe_gkd.groups import WorkerGroup
from recipe_gkd.pools import check_devices, create_pools, pool_specs
from recipe_gkd.rollout.environment import worker_environment as rollout_environment
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.weights.sync import WeightSync

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""What workers have to close themselves before they are killed."""


@dataclass(frozen=True)
class Workers:
    """Both pools, ready to work."""

    actors: WorkerGroup
    rollouts: WorkerGroup
    weights: WeightSync
    dp_size: int
    dp_ranks: list[int]
    """Of each actor rank."""


@asynccontextmanager
async def start_workers(
    config: Config, device: str, *, total_steps: int, stop_token_ids: Sequence[int]
) -> AsyncIterator[Workers]:
    """Reserve the pools, start every worker, connect actor and rollout; on leaving, end all their processes.

    ``stop_token_ids``: the teacher's; an answer ends there too, or the student would learn from what comes after the
    end of a turn. Raises :class:`ResourceError` before anything is started if the cluster is too small, and a worker's
    own error as soon as one fails to start.
    """
    timeout_s = config.trainer.startup_timeout_s
    actor_pool, rollout_pool = await create_pools(pool_specs(config, device), timeout_s=timeout_s)
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    n_actors = config.trainer.nnodes * config.trainer.n_gpus_per_node
    n_rollouts = config.rollout.nnodes * config.rollout.n_gpus_per_node // tp
    actors = WorkerGroup(
        "actor",
        actor_pool.spawn(
            ActorWorker,
            [
                dict(config=config, total_steps=total_steps, rank=rank, world_size=n_actors, device=device)
                for rank in range(n_actors)
            ],
            env=actor_environment(device),
        ),
    )
    rollouts = WorkerGroup(
        "rollout",
        rollout_pool.spawn(
            RolloutWorker,
            [
                dict(config=config, rank=rank, device=device, stop_token_ids=stop_token_ids)
                for rank in range(n_rollouts)
            ],
            slots=tp,
            env=rollout_environment(device),
        ),
    )
    try:
        layout, engines = await asyncio.gather(
            _set_up_actors(actors, timeout_s), rollouts.call("setup", timeout_s=timeout_s, phase="start")
        )
        reports = {
            group.label(rank): report
            for group, own in ((actors, layout), (rollouts, engines))
            for rank, report in enumerate(own)
        }
        _log_placement(reports)
        check_devices(reports)
        await _check_shared_folder(config, actors)
        bucket_bytes = int(config.actor_rollout_ref.rollout.update_weights_bucket_megabytes * (1 << 20))
        weights = WeightSync(
            actors,
            rollouts,
            tensor_parallel_size=tp,
            bucket_bytes=bucket_bytes,
            timeout_s=config.actor_rollout_ref.nccl_timeout,
        )
        yield Workers(actors, rollouts, weights, layout[0]["dp_size"], [report["dp_rank"] for report in layout])
    finally:
        await asyncio.gather(actors.stop(timeout_s=SHUTDOWN_S), rollouts.stop(timeout_s=SHUTDOWN_S))
        actor_pool.release()
        rollout_pool.release()


async def _set_up_actors(actors: WorkerGroup, timeout_s: float) -> list[dict[str, Any]]:
    address = await actors.call_one(0, "rendezvous", timeout_s=timeout_s, phase="start")
    return await actors.call("setup", *address, timeout_s=timeout_s, phase="start")


async def _check_shared_folder(config: Config, actors: WorkerGroup) -> None:
    """Each actor rank writes its part of a checkpoint: all must see the driver's folder, not one of the same name."""
    if config.trainer.save_freq <= 0:
        return
    folder = Path(config.trainer.default_local_dir).expanduser().absolute()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared_with_workers") as probe:
        seen = await actors.call("sees", probe.name, timeout_s=SHUTDOWN_S, phase="look for the checkpoint folder")
    if blind := [actors.label(rank) for rank, sees in enumerate(seen) if not sees]:
        raise ResourceError(
            f"{', '.join(blind)} cannot see trainer.default_local_dir={folder} of the driver; give a folder on a disk "
            "that all nodes share, or trainer.save_freq=-1 to write no checkpoints"
        )


def _log_placement(reports: dict[str, dict[str, Any]]) -> None:
    for label, report in reports.items():
        log.info(
            "%s: %s on node %s, process %d, ready in %.1f s",
            label,
            report["device"],
            report["node"],
            report["pid"],
            report["seconds"],
        )
