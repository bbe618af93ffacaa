"""Start, connection and shutdown of the workers of both pools."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.actor.shards import Cost, Sharding, token_cost
from recipe_gkd.actor.student_dims import read_student_dims
from recipe_gkd.checkpoints.folders import PROBE
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.config.hybrid_engine import hybrid_cuda_problems
from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.config.validate import saves_checkpoints
from recipe_gkd.diagnostics.collect import diagnose
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ConfigError, ResourceError, WorkerDied
from recipe_gkd.memory_budget import check_budget
from recipe_gkd.metrics.flops import sample_cost
from recipe_gkd.ray_cluster.capacity import ClusterCapacity, cluster_capacity
from recipe_gkd.ray_cluster.node_checks import check_nodes
from recipe_gkd.ray_cluster.object_store import ObjectStoreUsage, warn_if_small
from recipe_gkd.ray_cluster.placement import (
    check_devices,
    check_transport,
    collect_device_reports,
    environments_of_guests,
    placement_table,
)
from recipe_gkd.ray_cluster.pools import Pool, create_pools, pool_specs
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.ray_cluster.startup_progress import StartupProgress
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.environment import worker_environment as rollout_environment
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.runtime.tasks import run_to_end
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.runtime.worker_variables import worker_variables
from recipe_gkd.scoring.homes import Homes
from recipe_gkd.scoring.pool import ScoringPool
from recipe_gkd.scoring.setup import longest_batch, max_row_bytes, start_scoring
from recipe_gkd.weight_sync.spec import WeightSyncSpec
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer
from teacher.client import ClientSpec

log = logging.getLogger(__name__)

CONNECT_S = 60.0
"""Time that scoring workers have to reach the teachers, which the driver has reached before."""
SHUTDOWN_S = 10.0
"""Time that workers have for an orderly shutdown before they are killed."""


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
        engine_dtype: Data type of the rollout engines.
        actor_devices: Name of the device of each actor rank, such as ``NVIDIA H100 80GB HBM3`` or ``cpu``.
        scoring: Scoring workers. None if the teachers run in the driver's process.
        max_row_bytes: Limit of the teachers' rows of batches that are not trained on yet. None: no limit.
        store_usage: Use of Ray's object stores.
        capacity: Resources that the cluster could grant instead, for advice. None if they are unknown.
    """

    actors: WorkerGroup
    rollouts: WorkerGroup
    weights: WeightSynchronizer
    dp_ranks: list[int]
    sharding: Sharding
    restarts: RolloutRestarts
    engine_dtype: str = ""
    actor_devices: Sequence[str] = ()
    scoring: ScoringPool | None = None
    max_row_bytes: int | None = None
    store_usage: ObjectStoreUsage = field(default_factory=ObjectStoreUsage)
    capacity: ClusterCapacity | None = None

    async def metrics(self) -> dict[str, float]:
        """Return the numbers of restarted workers so far, and the use of Ray's object stores."""
        counts = {"rollout/restarts": float(self.restarts.n_restarts)}
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
    if device == "cuda" and (problems := list(hybrid_cuda_problems(config))):
        raise ConfigError("\n".join(problems))
    timeout_s = startup_timeout_s(config, device)
    pools = actor_pool, rollout_pool = await _reserve_pools(config, device, timeout_s=timeout_s)
    n_actors, n_rollouts = actor_pool.spec.n_workers, rollout_pool.spec.n_workers
    guest_environments: dict[int, dict[str, str]] = {}

    def start_actor(rank: int) -> Any:
        arguments = dict(total_steps=total_steps, world_size=n_actors, n_token_ids=n_tokens)
        return _spawn(actor_pool, ActorWorker, config, rank, actor_environment(device), arguments)

    def start_rollout(rank: int) -> Any:
        arguments = dict(stop_token_ids=stop_token_ids, n_tokens=n_tokens)
        env = rollout_environment(device)
        return _spawn(rollout_pool, RolloutWorker, config, rank, env, arguments, guest_environments.get(rank, {}))

    phase = "start of the workers"
    actors = WorkerGroup("actor", [start_actor(rank) for rank in range(n_actors)])
    rollouts = WorkerGroup("rollout", [])
    restarts = _restarts(config, rollouts, start_rollout, timeout_s)
    scoring = start_scoring(config, teacher_specs, actor_pool.nodes()) if teacher_specs else None
    groups = [actors, rollouts, *([] if scoring is None else [scoring.group])]
    try:
        if rollout_pool.spec.is_guest and device == "cuda":
            guest_environments = await environments_of_guests(actors, n_guests=n_rollouts, timeout_s=timeout_s)
        rollouts.handles = [start_rollout(rank) for rank in range(n_rollouts)]
        workers = await _connect(config, device, actors, rollouts, restarts, pools, scoring)
        phase = "training"
        yield workers
    except Exception as error:  # noqa: BLE001 - raised again with a diagnosis
        known = await _with_diagnosis(error, phase, groups, folder_of(config.trainer).absolute())
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
    actors: WorkerGroup,
    rollouts: WorkerGroup,
    restarts: RolloutRestarts,
    pools: Sequence[Pool],
    scoring: ScoringPool | None,
) -> Workers:
    """Set up the processes of all workers, and the transfer of weights between the pools."""
    timeout_s = startup_timeout_s(config, device)
    rollout = config.actor_rollout_ref.rollout
    async with StartupProgress() as progress:
        activity = "starting processes"
        started = {group.name: progress.begin(group.name, len(group), activity) for group in (actors, rollouts)}
        await check_nodes(config, device, pools, timeout_s=timeout_s)  # while the workers' processes start
        # Check the devices first. A wrong placement makes engines fail with errors that do not name it.
        reports = await collect_device_reports([actors, rollouts], timeout_s=timeout_s, on_result=started)
        log.info("workers:\n%s", placement_table(reports))
        check_devices(reports, is_hybrid=config.actor_rollout_ref.hybrid_engine)
        check_transport(reports, rollout.weight_transport)
        await _check_shared_folder(config, actors)
        connected = asyncio.ensure_future(scoring.connect(CONNECT_S)) if scoring is not None else None
        ranks, engines = await _set_up(config, device, actors, rollouts, progress)
        if connected is not None:
            await connected
    if scoring is not None:
        warn_if_small(scoring.nodes, scoring.free_shared_memory, scoring.row_bytes * longest_batch(config))
    homes = Homes.of(ranks, [str(reports[actors.label(rank)].get("node_id")) for rank in range(len(actors))])
    if scoring is not None:
        scoring.homes = homes
    await restarts.record_processes(range(len(rollouts)))
    weights = WeightSynchronizer(
        actors,
        rollouts,
        WeightSyncSpec(
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            bucket_bytes=int(rollout.update_weights_bucket_megabytes * (1 << 20)),
            timeout_s=config.actor_rollout_ref.nccl_timeout,
            transport=_transport(config),
            inflight=config.trainer.inflight_update,
            engine_dtype=engines[0]["dtype"],
        ),
        restarts=restarts,
    )
    return Workers(
        actors,
        rollouts,
        weights,
        dp_ranks=[report["dp_rank"] for report in ranks],
        sharding=Sharding(homes.of_ranks, _sample_cost(config)),
        restarts=restarts,
        engine_dtype=engines[0]["dtype"],
        actor_devices=[report["device_name"] for report in ranks],
        scoring=scoring,
        max_row_bytes=max_row_bytes(config, scoring),
        capacity=await _capacity(pools),
    )


def _restarts(config: Config, rollouts: WorkerGroup, start: Callable[[int], Any], timeout_s: float) -> RolloutRestarts:
    """Return the replacement of rollout workers. The state of a silent one is saved before it is killed."""
    root = folder_of(config.trainer).absolute()
    return RolloutRestarts(
        rollouts,
        start,
        allowed=config.trainer.max_worker_restarts,
        timeout_s=timeout_s,
        save_state=lambda error: diagnose(error, [rollouts], root),
    )


def _sample_cost(config: Config) -> Cost:
    """Return the cost of a sample: its FLOPs, or its number of tokens if they are unknown."""
    dims = read_student_dims(config.actor_rollout_ref.model.path, config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return token_cost if dims.flops_problem(longest) else sample_cost(dims)


async def _with_diagnosis(error: Exception, phase: str, groups: list[WorkerGroup], root: Path) -> Exception:
    """Save the state of all workers, and return the error to raise, with its cause."""
    known = as_known_error(error, phase)
    folder = await diagnose(known, groups, root)
    if folder is None:
        return known
    diagnosed = type(known)(f"{known}\ndiagnosis: {folder}")
    diagnosed.__cause__ = error
    return diagnosed


async def _end(groups: Sequence[WorkerGroup], restarts: RolloutRestarts, pools: Sequence[Pool]) -> None:
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


async def _capacity(pools: Sequence[Pool]) -> ClusterCapacity | None:
    """Return the resources that the cluster could grant instead of ``pools``, or None if Ray does not report them."""
    try:
        return await in_thread(cluster_capacity, pools)
    except (RayError, LookupError) as error:
        log.warning(
            "no advice about the sizes of the pools, because Ray did not report its resources: %s: %s",
            type(error).__name__,
            error,
        )
        return None


def _transport(config: Config) -> str:
    """Return the weight transport. ``auto`` avoids NCCL on shared GPUs, because it allows one rank per GPU."""
    transport = config.actor_rollout_ref.rollout.weight_transport
    if transport == "auto":
        return "ipc" if config.actor_rollout_ref.hybrid_engine and config.trainer.nnodes == 1 else "collective"
    return transport


async def _set_up(
    config: Config, device: str, actors: WorkerGroup, rollouts: WorkerGroup, progress: StartupProgress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Set up all workers and return their reports. Engines of the hybrid engine start after the actors, and then sleep.

    vLLM measures the free memory of the GPU at its start, and fails if another process changes it meanwhile.
    """
    timeout_s = startup_timeout_s(config, device)

    async def set_up_rollouts() -> list[dict[str, Any]]:
        done = progress.begin(rollouts.name, len(rollouts), "starting engines")
        return await rollouts.call("setup", timeout_s=timeout_s, phase="start", on_result=done)

    if config.actor_rollout_ref.hybrid_engine:
        ranks = await _set_up_actors(actors, timeout_s, progress)
        engines = await set_up_rollouts()
        # The actor may load a checkpoint now, with all its states on the device.
        await rollouts.call("sleep", timeout_s=timeout_s, phase="sleep of the rollout engines")
        return ranks, engines
    ranks, engines = await asyncio.gather(_set_up_actors(actors, timeout_s, progress), set_up_rollouts())
    return ranks, engines


async def _set_up_actors(actors: WorkerGroup, timeout_s: float, progress: StartupProgress) -> list[dict[str, Any]]:
    done = progress.begin(actors.name, len(actors), "loading the student")
    address = await actors.call_one(0, "rendezvous", timeout_s=timeout_s, phase="start")
    ranks = await actors.call("setup", *address, timeout_s=timeout_s, phase="start", on_result=done)
    log.info("actor: %s", ranks[0].get("layers", ""))
    for warning in ranks[0].get("warnings", ()):
        log.warning("actor: %s", warning)
    return ranks


async def _check_shared_folder(config: Config, actors: WorkerGroup) -> None:
    """Check that all actor ranks see the driver's run folder, because they write checkpoints and profiles there."""
    if not saves_checkpoints(config) and not config.trainer.profile.steps:
        return
    folder = folder_of(config.trainer).absolute()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PROBE) as probe:
        found = await actors.call(
            "path_exists", probe.name, timeout_s=SHUTDOWN_S, phase="look for the checkpoint folder"
        )
    if unable := [actors.label(rank) for rank, exists in enumerate(found) if not exists]:
        raise ResourceError(
            f"{', '.join(unable)} cannot see trainer.default_local_dir={folder} of the driver; set it to a folder on "
            "a disk that all nodes share, or write neither checkpoints nor profiles: trainer.save_freq=-1 "
            "trainer.best_metric=null trainer.profile.steps=[]"
        )
