"""Sizes of the pools and the schedule of a run, as far as they determine the time of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from recipe_gkd.config import Config
from recipe_gkd.config.schema import ActorConfig
from recipe_gkd.config.staleness import staleness_bound
from recipe_gkd.config.teachers import hosts
from recipe_gkd.metrics.advice.step_time_model import StageSeconds, step_seconds

LOCAL_HOSTS = ("127.", "localhost")  # prefixes of addresses of this machine, whose cores the pools use too

PoolSize = tuple[int, int]  # nodes, devices per node
Grants = Callable[[PoolSize, PoolSize], bool]  # (actor pool, rollout pool) -> True if the cluster has room for both


def _actor_divisor(actor: ActorConfig) -> int:
    """Return the number of devices of one model replica."""
    if actor.strategy == "fsdp":
        return max(1, actor.fsdp_config.fsdp_size)  # -1: the replica has as many devices as the pool
    megatron = actor.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert_ranks = megatron.expert_model_parallel_size * (megatron.expert_tensor_parallel_size or tp)
    return pp * math.lcm(tp * megatron.context_parallel_size, expert_ranks)


@dataclass(frozen=True, kw_only=True)
class ResourceLayout:
    """Resources and schedule of a run. Devices are GPUs, or CPU slots.

    Attributes:
        staleness: Maximum policy lag in optimizer steps.
        is_n_step_off: True if ``staleness`` is ``trainer.max_staleness``.
        takes_turns: True if the stages use devices in turn, which needs ``trainer.scheduler=sync``.
        inflight: True if weights are updated in the middle of responses.
        actor: Nodes and devices per node of the actor pool.
        rollout: Nodes and devices per node of the rollout pool.
        actor_divisor: Number of devices of one model replica, 1 if any number will do. The size of the actor pool is a
            multiple of it.
        rollout_divisor: Number of devices of one engine, which cannot span nodes.
        shared: True if both pools use the same devices.
        can_add_teachers: True if the teacher is a service, to which workers can be added.
        bucket_megabytes: Size of a weight bucket in MiB.
        grants: Test if the cluster has room for two pools. None: the cluster is unknown, and any size is possible.
        cores: Number of CPU cores that the pools share. None: the pools have their own devices.
        teacher_shares_cores: True if the teacher runs on the same cores.
    """

    staleness: int
    is_n_step_off: bool = False
    takes_turns: bool = False
    inflight: bool = False
    actor: PoolSize = (1, 1)
    rollout: PoolSize = (1, 1)
    actor_divisor: int = 1
    rollout_divisor: int = 1
    shared: bool = False
    n_teachers: int = 1
    can_add_teachers: bool = True
    bucket_megabytes: float = 512
    grants: Grants | None = None
    cores: float | None = None
    teacher_shares_cores: bool = False

    @classmethod
    def of(cls, config: Config, grants: Grants | None = None, cores: float | None = None) -> ResourceLayout:
        """Return the layout of a configuration.

        Args:
            grants: See the attribute.
            cores: See the attribute.
        """
        trainer, settings = config.trainer, config.actor_rollout_ref
        of_teachers = hosts(settings.teacher)
        is_service = settings.teacher.backend in ("zmq", "http")
        return cls(
            staleness=staleness_bound(trainer),
            is_n_step_off=trainer.scheduler == "n_step_off",
            takes_turns=settings.hybrid_engine or settings.teacher.sleep_between_batches,
            inflight=trainer.inflight_update,
            actor=(trainer.nnodes, trainer.n_gpus_per_node),
            rollout=config.rollout_pool,
            actor_divisor=_actor_divisor(settings.actor),
            rollout_divisor=settings.rollout.tensor_model_parallel_size,
            shared=settings.hybrid_engine,
            n_teachers=(settings.teacher.n_server_workers or 1) if is_service else 1,
            can_add_teachers=is_service,
            bucket_megabytes=settings.rollout.update_weights_bucket_megabytes,
            grants=grants,
            cores=cores,
            teacher_shares_cores=cores is not None and all(host.startswith(LOCAL_HOSTS) for host in of_teachers),
        )

    @property
    def n_slots(self) -> int:
        """Number of devices of both pools together."""
        return math.prod(self.actor) + (0 if self.shared else math.prod(self.rollout))

    def grants_pools(self, actor: PoolSize, rollout: PoolSize) -> bool:
        """Return True if the cluster has room for pools of these sizes, or is unknown."""
        return self.grants is None or self.grants(actor, rollout)

    def core_seconds(self, stages: StageSeconds) -> float:
        """Return a lower bound on the time of a step, in seconds: the work of all processes divided by the cores.

        The bound holds for every schedule and every number of workers. It is 0 if the pools have their own devices.
        """
        if self.cores is None:
            return 0.0
        work_s = math.prod(self.actor) * stages.update + math.prod(self.rollout) * stages.generate
        if self.teacher_shares_cores:
            work_s += self.n_teachers * stages.teacher
        return work_s / self.cores

    def expected(
        self, stages: StageSeconds, changed: StageSeconds, *, staleness: int | None = None, inflight: bool | None = None
    ) -> float:
        """Return the expected time of a step, in seconds, after a change.

        Args:
            stages: Stage times of the run without the change.
            changed: Stage times with the change.
            staleness: Maximum policy lag with the change. None: unchanged.
            inflight: True for weight updates in flight with the change. None: unchanged.
        """
        staleness = self.staleness if staleness is None else staleness
        inflight = self.inflight if inflight is None else inflight
        return max(step_seconds(changed, staleness, inflight=inflight), self.core_seconds(stages))
