"""Start the workers of both pools at the same time, connect them, and end them."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.checkpoints.folders import PROBE
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.diagnostics.collect import diagnose
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ResourceError, WorkerDied
from recipe_gkd.ray_cluster.capacity import ClusterCapacity, cluster_capacity
from recipe_gkd.ray_cluster.placement import check_devices, collect_device_reports, placement_table
from recipe_gkd.ray_cluster.pools import Pool, create_pools, pool_specs
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.environment import worker_environment as rollout_environment
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.runtime.tasks import run_to_end
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.weight_sync.spec import WeightSyncSpec
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""What workers have to close themselves before they are killed."""


@dataclass
class Workers:
    """Both pools, ready to work."""

    actors: WorkerGroup
    rollouts: WorkerGroup
    weights: WeightSynchronizer
    dp_ranks: list[int]
    """Of each actor rank."""
    restarts: RolloutRestarts
    capacity: ClusterCapacity | None = None
    """Resources that the cluster could grant instead, for advice."""

    @property
    def dp_size(self) -> int:
        return max(self.dp_ranks) + 1

    async def replace_dead_rollouts(self, death: WorkerDied) -> None:
        """Start new workers for those that died, if that is still allowed; they have no weights before a full sync."""
        await self.restarts.replace_dead(death)
        self.weights.forget()


@asynccontextmanager
async def start_workers(
    config: Config, device: str, *, total_steps: int, stop_token_ids: Sequence[int], n_tokens: int | None
) -> AsyncIterator[Workers]:
    """Reserve the pools, start every worker, connect actor and rollout; on leaving, end all their processes.

    ``stop_token_ids``: the teachers'; an answer ends there too, or the student would learn from what comes after the
    end of a turn. ``n_tokens``: ids of the student's tokenizer; the rest of its output layer is padding, to which no
    worker gives any probability; None: there is none.

    Raises :class:`ResourceError` before anything is started if the cluster is too small, and a worker's own error as
    soon as one fails to start. What goes wrong in the body is diagnosed while the workers still live; the error then
    names the folder.
    """
    timeout_s = config.trainer.startup_timeout_s
    actor_pool, rollout_pool = await create_pools(pool_specs(config, device), timeout_s=timeout_s)
    rollout = config.actor_rollout_ref.rollout
    n_actors, n_rollouts = actor_pool.spec.n_workers, rollout_pool.spec.n_workers

    def start_actor(rank: int) -> Any:
        arguments = dict(
            config=config, total_steps=total_steps, rank=rank, world_size=n_actors, device=device, n_tokens=n_tokens
        )
        return actor_pool.spawn(ActorWorker, rank, arguments, env=actor_environment(device))

    def start_rollout(rank: int) -> Any:
        arguments = dict(config=config, rank=rank, device=device, stop_token_ids=stop_token_ids, n_tokens=n_tokens)
        return rollout_pool.spawn(RolloutWorker, rank, arguments, env=rollout_environment(device))

    phase = "start of the workers"
    actors = WorkerGroup("actor", [start_actor(rank) for rank in range(n_actors)])
    rollouts = WorkerGroup("rollout", [start_rollout(rank) for rank in range(n_rollouts)])
    restarts = RolloutRestarts(rollouts, start_rollout, allowed=config.trainer.max_worker_restarts, timeout_s=timeout_s)
    try:
        # What is wrong with the places is told before engines fail of it, with errors that do not name it.
        places = await collect_device_reports([actors, rollouts], timeout_s=timeout_s)
        log.info("workers:\n%s", placement_table(places))
        check_devices(places, shared=config.rollout.share_actor_gpus)
        await _check_shared_folder(config, actors)
        layout, engines = await asyncio.gather(
            _set_up_actors(actors, timeout_s), rollouts.call("setup", timeout_s=timeout_s, phase="start")
        )
        await restarts.record_processes(range(n_rollouts))
        capacity = await _capacity((actor_pool, rollout_pool))
        weights = WeightSynchronizer(
            actors,
            rollouts,
            WeightSyncSpec(
                tensor_parallel_size=rollout.tensor_model_parallel_size,
                bucket_bytes=int(rollout.update_weights_bucket_megabytes * (1 << 20)),
                timeout_s=config.actor_rollout_ref.nccl_timeout,
                transport=_transport(config, device),
                inflight=config.trainer.inflight_update,
                engine_dtype=engines[0]["dtype"],
            ),
            repair=restarts.replace_dead,
        )
        phase = "training"
        yield Workers(actors, rollouts, weights, [report["dp_rank"] for report in layout], restarts, capacity)
    except Exception as error:
        known = as_known_error(error, phase)
        root = folder_of(config.trainer).absolute()
        if folder := await diagnose(known, [actors, rollouts], root):
            raise type(known)(f"{known}\ndiagnosis: {folder}") from error
        raise known from known.__cause__
    finally:
        try:
            stops = (actors.stop(timeout_s=SHUTDOWN_S), rollouts.stop(timeout_s=SHUTDOWN_S))
            for outcome in await asyncio.gather(*stops, return_exceptions=True):
                if isinstance(outcome, Exception):
                    log.error("workers could not be stopped: %s", outcome, exc_info=outcome)
        finally:  # canceled (a second signal): nothing more is waited for, and all processes end
            await run_to_end(restarts.kill_orphans(range(n_rollouts)))
            actor_pool.release()
            rollout_pool.release()


async def _capacity(pools: Sequence[Pool]) -> ClusterCapacity | None:
    """Return what the cluster could grant instead of ``pools``, or None if Ray does not tell: only advice needs it."""
    try:
        return await in_thread(cluster_capacity, pools)
    except (RayError, LookupError) as error:
        log.warning("no advice about the sizes of the pools: %s: %s", type(error).__name__, error)
        return None


def _transport(config: Config, device: str) -> str:
    """``rollout.weight_transport`` resolved: NCCL cannot have two ranks on one GPU."""
    asked = config.actor_rollout_ref.rollout.weight_transport
    if asked == "auto":
        return "ipc" if config.rollout.share_actor_gpus and device == "cuda" else "collective"
    return asked


async def _set_up_actors(actors: WorkerGroup, timeout_s: float) -> list[dict[str, Any]]:
    address = await actors.call_one(0, "rendezvous", timeout_s=timeout_s, phase="start")
    return await actors.call("setup", *address, timeout_s=timeout_s, phase="start")


async def _check_shared_folder(config: Config, actors: WorkerGroup) -> None:
    """Each actor rank writes its part of a checkpoint: all must see the driver's folder, not one of the same name."""
    if config.trainer.save_freq <= 0 and config.trainer.best_metric is None:
        return
    folder = folder_of(config.trainer).absolute()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PROBE) as probe:
        seen = await actors.call("sees", probe.name, timeout_s=SHUTDOWN_S, phase="look for the checkpoint folder")
    if blind := [actors.label(rank) for rank, sees in enumerate(seen) if not sees]:
        raise ResourceError(
            f"{', '.join(blind)} cannot see trainer.default_local_dir={folder} of the driver; give a folder on a disk "
            "that all nodes share, or trainer.save_freq=-1 trainer.best_metric=null to write no checkpoints"
        )
