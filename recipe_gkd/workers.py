"""Start, connection and shutdown of the workers of both pools."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayError

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.actor.ranks import RankReport
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.actor.shards import Cost, Sharding, token_cost
from recipe_gkd.actor.student_dims import read_student_dims
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.config.hybrid_engine import hybrid_cuda_problems
from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.config.timeouts import SYNC_TIMEOUT, timeout_of
from recipe_gkd.config.weight_transport import weight_transport
from recipe_gkd.diagnostics.collect import diagnose, with_diagnosis
from recipe_gkd.errors import ConfigError, GkdError, WorkerDied
from recipe_gkd.memory_budget import check_budget
from recipe_gkd.metrics.flops import sample_cost
from recipe_gkd.ray_cluster.actor_restarts import ActorRestarts
from recipe_gkd.ray_cluster.capacity import ClusterCapacity, capacity_or_none
from recipe_gkd.ray_cluster.node_checks import check_nodes
from recipe_gkd.ray_cluster.object_store import ObjectStoreUsage
from recipe_gkd.ray_cluster.placement import (
    Reports,
    check_devices,
    check_transport,
    collect_device_reports,
    environments_of_guests,
    placement_table,
)
from recipe_gkd.ray_cluster.pools import Pool, create_pools, pool_specs
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.ray_cluster.shared_folder import check_shared_folder
from recipe_gkd.ray_cluster.startup_progress import StartupProgress
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.engine_report import EngineReport
from recipe_gkd.rollout.environment import worker_environment as rollout_environment
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup, run_to_end
from recipe_gkd.runtime.worker_variables import worker_variables
from recipe_gkd.scoring.homes import Homes
from recipe_gkd.scoring.pool import ScoringPool
from recipe_gkd.scoring.setup import start_scoring, warn_about_memory
from recipe_gkd.weight_sync.spec import WeightSyncSpec
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from teacher.client import ClientSpec

log = logging.getLogger(__name__)
Actors = WorkerGroup[ActorWorker]
Rollouts = WorkerGroup[RolloutWorker]

CONNECT_S = 60.0
"""Time that scoring workers have to reach the teachers, which the driver has reached before."""
LOCATE_TIMEOUT_S = 5.0
"""Deadline of Ray's control service for the state of the actor ranks after an error."""
SHUTDOWN_S = 10.0
"""Time that workers have for an orderly shutdown before they are killed."""


@dataclass(frozen=True)
class ActorReports:
    """Reports of the actor ranks after their set-up.

    Attributes:
        ranks: Report of each rank.
        homes: Nodes of the data-parallel ranks.
    """

    ranks: list[RankReport]
    homes: Homes

    @classmethod
    def of(cls, ranks: list[RankReport], actors: Actors, devices: Reports) -> ActorReports:
        """Return the reports of the set-up, with the nodes of the device reports."""
        nodes = [str(devices[actors.label(rank)].node_id) for rank in range(len(actors))]
        return cls(ranks, Homes.of(ranks, nodes))

    @property
    def dp_ranks(self) -> list[int]:
        """Data-parallel rank of each rank."""
        return [report.dp_rank for report in self.ranks]


@dataclass
class Workers:
    """Connected workers of both pools.

    Attributes:
        actors: Actor ranks.
        rollouts: Rollout workers.
        weights: Transfer of weights from the actors to the rollout workers.
        dp_ranks: Data-parallel rank of each actor rank.
        sharding: Division of a batch among the data-parallel ranks.
        restarts: Replacement of dead rollout workers.
        actor_restarts: Replacement of all actor ranks after one was lost.
        engine_dtype: Data type of the rollout engines.
        actor_devices: Name of the device of each actor rank, such as ``NVIDIA H100 80GB HBM3`` or ``cpu``.
        scoring: Scoring workers. None if the teachers run in the driver's process.
        store_usage: Use of Ray's object stores.
        capacity: Resources that the cluster could grant instead, for advice. None if they are unknown.
    """

    actors: Actors
    rollouts: Rollouts
    weights: WeightSynchronizer
    dp_ranks: list[int]
    sharding: Sharding
    restarts: RolloutRestarts
    actor_restarts: ActorRestarts[ActorWorker, ActorReports]
    engine_dtype: str = ""
    actor_devices: Sequence[str] = ()
    scoring: ScoringPool | None = None
    store_usage: ObjectStoreUsage = field(default_factory=ObjectStoreUsage)
    capacity: ClusterCapacity | None = None

    async def metrics(self) -> dict[str, float]:
        """Return the numbers of restarted workers so far, and the use of Ray's object stores."""
        counts = {
            "actor/restarts": float(self.actor_restarts.n_restarts),
            "rollout/restarts": float(self.restarts.n_restarts),
        }
        if self.scoring is not None:
            counts["scoring/restarts"] = float(self.scoring.n_restarts)
        return counts | await self.store_usage.metrics()

    async def replace_dead_rollouts(self, death: WorkerDied) -> None:
        """Replace dead rollout workers, and silent ones if the death is a missed deadline.

        New workers have no weights until a complete sync.

        Raises:
            WorkerDied: No more workers may be replaced (``trainer.max_worker_restarts``).
        """
        await self.restarts.replace_dead(death)
        self.weights.forget()

    async def actor_is_lost(self, error: BaseException) -> bool:
        """Return True if an actor rank has ended, or if it did not answer before a deadline that ``error`` reports.

        It is also True if Ray does not report the state of the ranks.
        """
        if not isinstance(error, GkdError):
            return False
        try:
            async with asyncio.timeout(LOCATE_TIMEOUT_S):
                return bool(await self.actor_restarts.lost(error))
        except (RayError, OSError) as unknown:  # TimeoutError is an OSError
            log.warning("Ray does not report the state of the actor ranks: %s", unknown)
            return True

    async def restart_actors(self, error: GkdError) -> None:
        """Start all actor ranks again if one was lost, with the weights of the model folder. The engines stay.

        Args:
            error: Error with which the training ended.

        Raises:
            GkdError: ``error`` itself if no rank was lost or no restart is left (``trainer.max_actor_restarts``), or an
                error of the start.
        """
        reports = await self.actor_restarts.restart(error)
        self.dp_ranks = reports.dp_ranks
        self.sharding = replace(self.sharding, homes=reports.homes.of_ranks)
        if self.scoring is not None:
            await self.scoring.move(reports.homes, CONNECT_S)
        await self.restarts.replace_dead()  # one whose replacement was interrupted by the error
        self.weights.forget()


@asynccontextmanager
async def start_workers(
    config: Config,
    device: str,
    *,
    total_steps: int,
    stop_token_ids: Sequence[int],
    n_tokens: int | None,
    teacher_specs: Mapping[str, ClientSpec] | None = None,
) -> AsyncIterator[Workers]:
    """Reserve the pools, start all workers and connect them. End all their processes when the body ends.

    An error of the body is diagnosed while the workers still run. The raised error names the folder of the diagnosis.

    Args:
        config: Configuration of the run.
        device: ``"cuda"`` or ``"cpu"``.
        total_steps: Number of optimizer steps at the end of the run.
        stop_token_ids: Ids at which the teachers end a turn. Responses end there too.
        n_tokens: Number of ids of the student's tokenizer. No worker samples the others. None if there are no others.
        teacher_specs: Client of each teacher by name, for the scoring workers. None: no scoring workers.

    Raises:
        ConfigError: Actor and rollout engines cannot share CUDA devices as configured. No worker was started.
        ResourceError: The cluster, or a slot's memory for a phase of the hybrid engine, is too small. Nothing started.
        GkdError: A worker failed to start.
    """
    timeout_s = startup_timeout_s(config, device)
    pools = actor_pool, rollout_pool = await _reserve_pools(config, device, timeout_s=timeout_s)
    n_actors, n_rollouts = actor_pool.spec.n_workers, rollout_pool.spec.n_workers
    guest_environments: dict[int, dict[str, str]] = {}

    def start_actor(rank: int) -> Any:
        arguments = dict(total_steps=total_steps, world_size=n_actors, n_token_ids=n_tokens)
        env = actor_environment(device, config.actor_rollout_ref.actor.strategy)
        return _spawn(actor_pool, ActorWorker, config, rank, env, arguments)

    def start_rollout(rank: int) -> Any:
        arguments = dict(stop_token_ids=stop_token_ids, n_tokens=n_tokens)
        env = rollout_environment(device)
        return _spawn(rollout_pool, RolloutWorker, config, rank, env, arguments, guest_environments.get(rank, {}))

    phase = "start of the workers"
    actors: Actors = WorkerGroup("actor", [start_actor(rank) for rank in range(n_actors)])
    rollouts: Rollouts = WorkerGroup("rollout", [])
    restarts = _restarts(config, rollouts, start_rollout, timeout_s)
    actor_restarts = _actor_restarts(config, device, actors, start_actor)
    scoring = start_scoring(config, teacher_specs, actor_pool.nodes()) if teacher_specs else None
    groups: list[WorkerGroup[object]] = [actors, rollouts, *([] if scoring is None else [scoring.group])]
    try:
        if rollout_pool.spec.is_guest and device == "cuda":
            guest_environments = await environments_of_guests(actors, n_guests=n_rollouts, timeout_s=timeout_s)
        rollouts.handles = [start_rollout(rank) for rank in range(n_rollouts)]
        workers = await _connect(config, device, actor_restarts, rollouts, restarts, pools, scoring)
        phase = "training"
        yield workers
    except Exception as error:  # noqa: BLE001 - raised again with a diagnosis
        known = await with_diagnosis(error, phase, groups, folder_of(config.trainer).absolute())
        raise known from known.__cause__
    finally:
        await _end(groups, restarts, pools)


def _spawn(
    pool: Pool,
    worker: type,
    config: Config,
    rank: int,
    env: Mapping[str, str],
    arguments: Mapping[str, Any],
    own_env: Mapping[str, str] | None = None,
) -> Any:
    """Start a worker in its slots, with the variables of the run and those of ``own_env``; return its handle."""
    variables = worker_variables(env, environment=os.environ, extra=config.ray_init.env_vars) | dict(own_env or {})
    own = dict(config=config, rank=rank, device=pool.spec.device)
    return pool.spawn(worker, rank, own | dict(arguments), env=variables)


async def _reserve_pools(config: Config, device: str, *, timeout_s: float) -> tuple[Pool, ...]:
    """Reserve both pools, and check that the phases of the hybrid engine fit into the memory of their slots."""
    if device == "cuda" and (problems := list(hybrid_cuda_problems(config))):
        raise ConfigError.joined(problems)
    pools = await create_pools(pool_specs(config, device), timeout_s=timeout_s)
    try:
        await check_budget(config, device, pools, timeout_s=timeout_s)
    except BaseException:
        for pool in pools:
            pool.release()
        raise
    return pools


async def _connect(
    config: Config,
    device: str,
    actor_restarts: ActorRestarts[ActorWorker, ActorReports],
    rollouts: Rollouts,
    restarts: RolloutRestarts,
    pools: Sequence[Pool],
    scoring: ScoringPool | None,
) -> Workers:
    """Set up the processes of all workers, and the transfer of weights between the pools."""
    timeout_s = startup_timeout_s(config, device)
    rollout, actors = config.actor_rollout_ref.rollout, actor_restarts.actors
    async with StartupProgress() as progress:
        activity = "starting processes"
        started = {group.name: progress.begin(group.name, len(group), activity) for group in (actors, rollouts)}
        await check_nodes(config, device, pools, timeout_s=timeout_s)  # while the workers' processes start
        # Check the devices first. A wrong placement makes engines fail with errors that do not name it.
        reports = await collect_device_reports([actors, rollouts], timeout_s=timeout_s, on_result=started)
        log.info("workers:\n%s", placement_table(reports))
        check_devices(reports, is_hybrid=config.actor_rollout_ref.hybrid_engine)
        check_transport(reports, rollout.weight_transport)
        await check_shared_folder(config, actors)
        async with FirstErrorTaskGroup() as tasks:
            connected = None if scoring is None else tasks.start(scoring.connect(CONNECT_S))
            ranks, engines = await _set_up(config, device, actors, rollouts, progress)
            if connected is not None:
                await connected
    actor_reports = ActorReports.of(ranks, actors, reports)
    if scoring is not None:
        scoring.homes = actor_reports.homes
        warn_about_memory(config, scoring)
    await restarts.record_processes(range(len(rollouts)))
    weights = WeightSynchronizer(
        actors,
        rollouts,
        WeightSyncSpec(
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            bucket_bytes=int(rollout.update_weights_bucket_megabytes * (1 << 20)),
            timeout_s=timeout_of(config, SYNC_TIMEOUT),
            transport=weight_transport(config),
            inflight=config.trainer.inflight_update,
            engine_dtype=engines[0].dtype,
        ),
        restarts=restarts,
    )
    return Workers(
        actors,
        rollouts,
        weights,
        dp_ranks=actor_reports.dp_ranks,
        sharding=Sharding(actor_reports.homes.of_ranks, _sample_cost(config)),
        restarts=restarts,
        actor_restarts=actor_restarts,
        engine_dtype=engines[0].dtype,
        actor_devices=[report.device_name for report in ranks],
        scoring=scoring,
        capacity=await capacity_or_none(pools),
    )


def _restarts(config: Config, rollouts: Rollouts, start: Callable[[int], Any], timeout_s: float) -> RolloutRestarts:
    """Return the replacement of rollout workers. The state of a silent one is saved before it is killed."""
    root = folder_of(config.trainer).absolute()
    return RolloutRestarts(
        rollouts,
        start,
        allowed=config.trainer.max_worker_restarts,
        timeout_s=timeout_s,
        save_state=lambda error: diagnose(error, [rollouts], root),
    )


def _actor_restarts(
    config: Config, device: str, actors: Actors, start: Callable[[int], Any]
) -> ActorRestarts[ActorWorker, ActorReports]:
    """Return the replacement of the actor ranks. Ranks that share their devices are not started again.

    Models of other processes may occupy these devices at the time of the failure.
    """
    settings, timeout_s = config.actor_rollout_ref, startup_timeout_s(config, device)
    shares_devices = settings.hybrid_engine or settings.teacher.sleep_between_batches
    root = folder_of(config.trainer).absolute()

    async def set_up() -> ActorReports:
        async with StartupProgress() as progress:
            devices = await collect_device_reports([actors], timeout_s=timeout_s)
            await check_shared_folder(config, actors)
            return ActorReports.of(await _set_up_actors(actors, timeout_s, progress), actors, devices)

    return ActorRestarts(
        actors,
        start,
        set_up,
        allowed=0 if shares_devices else config.trainer.max_actor_restarts,
        save_state=lambda error: diagnose(error, [actors], root),
    )


def _sample_cost(config: Config) -> Cost:
    """Return the cost of a sample: its FLOPs, or its number of tokens if they are unknown."""
    dims = read_student_dims(config.actor_rollout_ref.model.path, config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return token_cost if dims.flops_problem(longest) else sample_cost(dims)


async def _end(groups: Sequence[WorkerGroup[object]], restarts: RolloutRestarts, pools: Sequence[Pool]) -> None:
    """Shut down all workers, kill their remaining processes and release the pools."""
    try:
        stops = (group.stop(timeout_s=SHUTDOWN_S) for group in groups)
        for outcome in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("workers could not be stopped: %s", outcome, exc_info=outcome)
    finally:  # after a cancellation by a second signal too: end all processes without waiting for the shutdown
        await run_to_end(restarts.kill_orphans())
        for pool in pools:
            pool.release()


async def _set_up(
    config: Config,
    device: str,
    actors: Actors,
    rollouts: Rollouts,
    progress: StartupProgress,
) -> tuple[list[RankReport], list[EngineReport]]:
    """Set up all workers and return their reports. Engines of the hybrid engine start after the actors, and then sleep.

    vLLM measures the free memory of the GPU at its start, and fails if another process changes it meanwhile.
    """
    timeout_s = startup_timeout_s(config, device)

    async def set_up_rollouts() -> list[EngineReport]:
        done = progress.begin(rollouts.name, len(rollouts), "starting engines")
        return await rollouts.call(RolloutWorker.setup, timeout_s=timeout_s, phase="start", on_result=done)

    if config.actor_rollout_ref.hybrid_engine:
        ranks = await _set_up_actors(actors, timeout_s, progress)
        engines = await set_up_rollouts()
        # The actor may load a checkpoint now, with all its states on the device.
        await rollouts.call(RolloutWorker.sleep, timeout_s=timeout_s, phase="sleep of the rollout engines")
        return ranks, engines
    ranks, engines = await asyncio.gather(_set_up_actors(actors, timeout_s, progress), set_up_rollouts())
    return ranks, engines


async def _set_up_actors(actors: Actors, timeout_s: float, progress: StartupProgress) -> list[RankReport]:
    done = progress.begin(actors.name, len(actors), "loading the student")
    address = await actors.call_one(0, ActorWorker.rendezvous, timeout_s=timeout_s, phase="start")
    ranks = await actors.call(ActorWorker.setup, address, timeout_s=timeout_s, phase="start", on_result=done)
    log.info("actor: %s", ranks[0].summary)
    for warning in ranks[0].warnings:
        log.warning("actor: %s", warning)
    return ranks
