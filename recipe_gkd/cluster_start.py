"""Start and shutdown of the workers of a run: pools, processes, set-up, connections."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ray.actor import ActorHandle

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.actor.ranks import RankReport
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.cluster import SCORING_CONNECT_S, ActorReports, Cluster
from recipe_gkd.config import Config
from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.config.timeouts import SYNC_TIMEOUT, timeout_of
from recipe_gkd.config.weight_transport import cuda_problems, weight_transport
from recipe_gkd.data.sharding import Cost, Sharding, token_cost
from recipe_gkd.diagnostics.collect import diagnose, with_diagnosis
from recipe_gkd.errors import ConfigError
from recipe_gkd.memory_budget import check_budget
from recipe_gkd.metrics.flops import sample_cost
from recipe_gkd.ray_cluster.actor_restarts import ActorRestarts
from recipe_gkd.ray_cluster.capacity import capacity_or_none
from recipe_gkd.ray_cluster.node_checks import check_nodes
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
from recipe_gkd.teachers.cache.scores import CacheSettings
from recipe_gkd.teachers.scoring.clients import ClientDescription
from recipe_gkd.teachers.scoring.homes import Homes
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.teachers.scoring.setup import start_scoring, warn_about_memory
from recipe_gkd.weight_sync.spec import WeightSyncSpec
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from teacher.common.sizes import MIB

log = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""Time that workers have for a graceful shutdown before they are killed."""


@asynccontextmanager
async def start_cluster(
    config: Config,
    device: str,
    *,
    total_steps: int,
    stop_token_ids: Sequence[int],
    n_tokens: int | None,
    teacher_specs: Mapping[str, ClientDescription] | None = None,
    caches: Mapping[str, CacheSettings] | None = None,
) -> AsyncIterator[Cluster]:
    """Reserve the pools, start all workers and connect them. End all their processes when the body ends.

    An error of the body is diagnosed while the workers still run. The raised error has the folder as ``diagnosis``.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        total_steps: Number of optimizer steps at the end of the run.
        stop_token_ids: Ids at which the teachers end a turn. Responses end there too.
        n_tokens: Number of ids of the student's tokenizer. No worker samples the others. None if there are no others.
        teacher_specs: Client of each teacher by name, for the scoring workers. None: no scoring workers.
        caches: Cache of each teacher that has one, by name.

    Raises:
        ConfigError: Actor and rollout engines cannot exchange weights between CUDA devices. No worker was started.
        ResourceError: The cluster, or a slot's memory for a phase of the hybrid engine, is too small. Nothing started.
        GkdError: A worker failed to start.
    """
    if device == "cuda" and (problems := list(cuda_problems(config, os.environ))):
        raise ConfigError.joined(problems)
    arguments: dict[str, dict[str, Any]] = {
        "actor": dict(total_steps=total_steps, n_token_ids=n_tokens),
        "rollout": dict(stop_token_ids=stop_token_ids, n_tokens=n_tokens),
    }
    start = _ClusterStart(config, device, arguments)
    await start.reserve_pools()
    phase = "start of the workers"
    try:
        await start.start_processes(teacher_specs, caches or {})
        cluster = await start.connect()
        phase = "training"
        yield cluster
    except Exception as error:  # noqa: BLE001 - raised again with a diagnosis
        known = await with_diagnosis(error, phase, start.groups, start.root)
        raise known from known.__cause__
    finally:
        await start.end()


class _ClusterStart:
    """Start of the workers of a run, in steps; see :func:`start_cluster`.

    Attributes:
        root: Run folder.
    """

    def __init__(self, config: Config, device: str, arguments: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the groups, without workers.

        Args:
            device: ``"cuda"`` or ``"cpu"``.
            arguments: Further arguments of the workers' constructors, by pool.
        """
        self.root = folder_of(config.trainer).absolute()
        self._config, self._device, self._arguments = config, device, arguments
        self._timeout_s = startup_timeout_s(config, device)
        self._actors: WorkerGroup[ActorWorker] = WorkerGroup("actor", [])
        self._rollouts: WorkerGroup[RolloutWorker] = WorkerGroup("rollout", [])
        self._scoring: ScoringPool | None = None
        self._pools: tuple[Pool, ...] = ()
        self._guest_environments: dict[int, dict[str, str]] = {}
        self._restarts = RolloutRestarts(
            self._rollouts,
            self._start_rollout,
            allowed=config.trainer.max_worker_restarts,
            timeout_s=self._timeout_s,
            save_state=lambda error: diagnose(error, [self._rollouts], self.root),
        )

    @property
    def groups(self) -> list[WorkerGroup[object]]:
        """Groups of all workers that were started."""
        scoring = [] if self._scoring is None else [self._scoring.group]
        return [self._actors, self._rollouts, *scoring]

    async def reserve_pools(self) -> None:
        """Reserve both pools, and check that the phases of the hybrid engine fit into the memory of their slots."""
        self._pools = await create_pools(pool_specs(self._config, self._device), timeout_s=self._timeout_s)
        try:
            await check_budget(self._config, self._device, self._pools, timeout_s=self._timeout_s)
        except BaseException:
            self._release_pools()
            raise

    async def start_processes(
        self, teacher_specs: Mapping[str, ClientDescription] | None, caches: Mapping[str, CacheSettings]
    ) -> None:
        """Start the processes of all workers, without waiting for them."""
        actor_pool, rollout_pool = self._pools
        self._actors.handles = [self._start_actor(rank) for rank in range(actor_pool.spec.n_workers)]
        if teacher_specs:
            self._scoring = start_scoring(self._config, teacher_specs, caches, actor_pool.nodes())
        n_rollouts = rollout_pool.spec.n_workers
        if rollout_pool.spec.is_guest and self._device == "cuda":
            self._guest_environments = await environments_of_guests(
                self._actors, n_guests=n_rollouts, timeout_s=self._timeout_s
            )
        self._rollouts.handles = [self._start_rollout(rank) for rank in range(n_rollouts)]

    def _start_actor(self, rank: int) -> ActorHandle:
        pool, _ = self._pools
        env = actor_environment(self._device, self._config.actor_rollout_ref.actor.strategy)
        arguments = dict(self._arguments["actor"], world_size=pool.spec.n_workers)
        return self._spawn(pool, ActorWorker, rank, env, arguments)

    def _start_rollout(self, rank: int) -> ActorHandle:
        _, pool = self._pools
        env = rollout_environment(self._device)
        return self._spawn(
            pool, RolloutWorker, rank, env, self._arguments["rollout"], self._guest_environments.get(rank)
        )

    def _spawn(
        self,
        pool: Pool,
        worker: type,
        rank: int,
        env: Mapping[str, str],
        arguments: Mapping[str, Any],
        own_env: Mapping[str, str] | None = None,
    ) -> ActorHandle:
        """Start a worker in its slots, with the variables of the run and of ``own_env``; return its handle."""
        variables = worker_variables(env, environment=os.environ, extra=self._config.ray_init.env_vars)
        variables |= dict(own_env or {})
        own = dict(config=self._config, rank=rank, device=pool.spec.device)
        return pool.spawn(worker, rank, own | dict(arguments), env=variables)

    async def connect(self) -> Cluster:
        """Set up the processes of all workers, and the transfer of weights between the pools."""
        rollout = self._config.actor_rollout_ref.rollout
        async with StartupProgress() as progress:
            reports = await self._check_placement(progress)
            async with FirstErrorTaskGroup() as tasks:
                connected = None if self._scoring is None else tasks.start(self._scoring.connect(SCORING_CONNECT_S))
                ranks, engines = await self._set_up(progress)
                if connected is not None:
                    await connected
        actor_reports = self._actor_reports(ranks, reports)
        if self._scoring is not None:
            self._scoring.homes = actor_reports.homes
            warn_about_memory(self._config, self._scoring)
        await self._restarts.record_processes(range(len(self._rollouts)))
        spec = WeightSyncSpec(
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            bucket_bytes=int(rollout.update_weights_bucket_megabytes * MIB),
            timeout_s=timeout_of(self._config, SYNC_TIMEOUT),
            transport=weight_transport(self._config),
            inflight=self._config.trainer.inflight_update,
            engine_dtype=engines[0].dtype,
        )
        return Cluster(
            self._config,
            self._actors,
            self._rollouts,
            WeightSynchronizer(self._actors, self._rollouts, spec, restarts=self._restarts),
            dp_ranks=actor_reports.dp_ranks,
            sharding=Sharding(actor_reports.homes.of_ranks, _sample_cost(self._config)),
            restarts=self._restarts,
            actor_restarts=self._actor_restarts(),
            engine_dtype=engines[0].dtype,
            actor_devices=[report.device_name for report in ranks],
            scoring=self._scoring,
            capacity=await capacity_or_none(self._pools),
        )

    async def _check_placement(self, progress: StartupProgress) -> Reports:
        """Check nodes, devices and the run folder before the engines start, and return the workers' device reports.

        A wrong placement makes engines fail with errors that do not name it.
        """
        config, groups = self._config, (self._actors, self._rollouts)
        started = {group.name: progress.begin(group.name, len(group), "starting processes") for group in groups}
        await check_nodes(config, self._device, self._pools, timeout_s=self._timeout_s)  # while the processes start
        reports = await collect_device_reports(
            [self._actors, self._rollouts], timeout_s=self._timeout_s, on_result=started
        )
        log.info("workers:\n%s", placement_table(reports))
        check_devices(reports, is_hybrid=config.actor_rollout_ref.hybrid_engine)
        check_transport(reports, config.actor_rollout_ref.rollout.weight_transport)
        await check_shared_folder(config, self._actors)
        return reports

    async def _set_up(self, progress: StartupProgress) -> tuple[list[RankReport], list[EngineReport]]:
        """Set up all workers. Engines of the hybrid engine start after the actors, and then sleep.

        vLLM measures the free memory of the GPU at its start, and fails if another process changes it meanwhile.
        """
        if self._config.actor_rollout_ref.hybrid_engine:
            ranks = await self._set_up_actors(progress)
            engines = await self._set_up_rollouts(progress)
            # The actor may load a checkpoint now, with all its states on the device.
            await self._rollouts.call(
                RolloutWorker.sleep, timeout_s=self._timeout_s, phase="sleep of the rollout engines"
            )
            return ranks, engines
        return await asyncio.gather(self._set_up_actors(progress), self._set_up_rollouts(progress))

    async def _set_up_rollouts(self, progress: StartupProgress) -> list[EngineReport]:
        done = progress.begin(self._rollouts.name, len(self._rollouts), "starting engines")
        return await self._rollouts.call(RolloutWorker.setup, timeout_s=self._timeout_s, phase="start", on_result=done)

    async def _set_up_actors(self, progress: StartupProgress) -> list[RankReport]:
        actors, timeout_s = self._actors, self._timeout_s
        done = progress.begin(actors.name, len(actors), "loading the student")
        address = await actors.call_one(0, ActorWorker.rendezvous, timeout_s=timeout_s, phase="start")
        ranks = await actors.call(ActorWorker.setup, address, timeout_s=timeout_s, phase="start", on_result=done)
        log.info("actor: %s", ranks[0].summary)
        for warning in ranks[0].warnings:
            log.warning("actor: %s", warning)
        return ranks

    def _actor_reports(self, ranks: list[RankReport], devices: Reports) -> ActorReports:
        """Return the reports of the ranks' set-up, with the nodes of the device reports."""
        nodes = [str(devices[self._actors.label(rank)].node_id) for rank in range(len(self._actors))]
        return ActorReports(ranks, Homes.of(ranks, nodes))

    def _actor_restarts(self) -> ActorRestarts[ActorWorker, ActorReports]:
        """Return the replacement of the actor ranks. Ranks that share their devices are not started again.

        Models of other processes may occupy these devices at the time of the failure.
        """
        settings = self._config.actor_rollout_ref
        shares_devices = settings.hybrid_engine or settings.teacher.sleep_between_batches

        async def set_up() -> ActorReports:
            async with StartupProgress() as progress:
                devices = await collect_device_reports([self._actors], timeout_s=self._timeout_s)
                await check_shared_folder(self._config, self._actors)
                return self._actor_reports(await self._set_up_actors(progress), devices)

        return ActorRestarts(
            self._actors,
            self._start_actor,
            set_up,
            allowed=0 if shares_devices else self._config.trainer.max_actor_restarts,
            save_state=lambda error: diagnose(error, [self._actors], self.root),
        )

    async def end(self) -> None:
        """Shut down all workers, kill their remaining processes and release the pools."""
        try:
            stops = (group.stop(timeout_s=SHUTDOWN_S) for group in self.groups)
            for outcome in await asyncio.gather(*stops, return_exceptions=True):
                if isinstance(outcome, Exception):
                    log.error("workers could not be stopped: %s", outcome, exc_info=outcome)
        finally:  # after a cancellation by a second signal too: end all processes without waiting for the shutdown
            await run_to_end(self._restarts.kill_orphans())
            self._release_pools()

    def _release_pools(self) -> None:
        for pool in self._pools:
            pool.release()


def _sample_cost(config: Config) -> Cost:
    """Return the cost of a sample: its FLOPs, or its number of tokens if they are unknown."""
    dims = read_student_dims(config.actor_rollout_ref.model.path, config)
    return token_cost if dims.flops_problem() else sample_cost(dims)
