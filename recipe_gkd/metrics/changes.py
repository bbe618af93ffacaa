"""What could be changed about a run to make its steps shorter, and what the model of a step expects of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipe_gkd.config import Config
from recipe_gkd.config.staleness import MAX_STALENESS, staleness_bound
from recipe_gkd.config.teachers import addresses
from recipe_gkd.metrics.step_time_model import StageSeconds, step_seconds

WAITS = {
    "generation": ("timing/wait_prev_gen",),
    "teacher": ("timing/wait_prev_teacher", "timing/wait_prev_prev_teacher"),
    "sync": ("timing/wait_sync",),
    "reward": ("timing/wait_reward",),
}
"""What the trainer may wait for, and the metrics of that."""
SYNC, TRANSFER = "timing/sync_rollout_weights", "timing/sync_rollout_weights_transfer"
MEGABYTES = "weights/megabytes"
NEEDED = (
    "timing/step",
    "timing/wait_prev_gen",
    "timing/generate_sequences",
    "timing/generate_sequences_mean",
    "timing/get_teacher_knowledge",
    "timing/teacher_tail",
    "timing/sync_rollout_weights",
    "perf/idle_actor",
    "perf/idle_rollout",
    "perf/idle_teacher",
)
"""What :func:`stage_seconds` cannot do without."""


LOCAL_HOSTS = ("127.", "localhost")
"""Prefixes of this machine's addresses, whose cores the pools use, too."""

Grants = Callable[[tuple[int, int], tuple[int, int]], bool]
"""Function of (nodes, devices on each) of the actor pool and of the rollout pool: True if the cluster has them."""


@dataclass(frozen=True, kw_only=True)
class ResourceLayout:
    """What the model knows of a configuration. Devices are GPUs, or slots on a CPU."""

    staleness: int
    inflight: bool = False
    actor: tuple[int, int] = (1, 1)
    """Nodes, devices on each."""
    rollout: tuple[int, int] = (1, 1)
    actor_divisor: int = 1
    """Devices of one replica of the model."""
    rollout_divisor: int = 1
    """Devices of one engine, which lives on one node."""
    shared: bool = False
    """Both pools live on the same devices."""
    n_teachers: int = 1
    bucket_megabytes: float = 512
    grants: Grants | None = None
    """Test for pools that the cluster has room for. None: the cluster is unknown, and every pool is possible."""
    cores: float | None = None
    """CPU cores that the pools share; None: they have devices of their own."""
    teacher_shares_cores: bool = False
    """True if the teacher uses the same cores."""

    @classmethod
    def of(cls, config: Config, grants: Grants | None = None, cores: float | None = None) -> ResourceLayout:
        trainer, settings = config.trainer, config.actor_rollout_ref
        megatron = settings.actor.megatron
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        return cls(
            staleness=staleness_bound(trainer),
            inflight=trainer.inflight_update,
            actor=(trainer.nnodes, trainer.n_gpus_per_node),
            rollout=(config.rollout.nnodes, config.rollout.n_gpus_per_node),
            actor_divisor=pp
            * math.lcm(tp, megatron.expert_model_parallel_size * (megatron.expert_tensor_parallel_size or tp)),
            rollout_divisor=settings.rollout.tensor_model_parallel_size,
            shared=config.rollout.share_actor_gpus,
            n_teachers=settings.teacher.n_server_workers,
            bucket_megabytes=settings.rollout.update_weights_bucket_megabytes,
            grants=grants,
            cores=cores,
            teacher_shares_cores=cores is not None
            and all(host.startswith(LOCAL_HOSTS) for host, _ in addresses(settings.teacher).values()),
        )

    @property
    def n_slots(self) -> int:
        """Devices of both pools together."""
        return math.prod(self.actor) + (0 if self.shared else math.prod(self.rollout))

    def grants_pools(self, actor: tuple[int, int], rollout: tuple[int, int]) -> bool:
        """Return True if the cluster has room for pools of these sizes, or is unknown."""
        return self.grants is None or self.grants(actor, rollout)

    def core_seconds(self, stages: StageSeconds) -> float:
        """Return a lower bound on the seconds of a step: the work of all processes, shared out over all cores.

        No schedule and no other number of workers makes it less. 0 if the pools have devices of their own.
        """
        if self.cores is None:
            return 0.0
        work = math.prod(self.actor) * stages.update + math.prod(self.rollout) * stages.generate
        if self.teacher_shares_cores:
            work += self.n_teachers * stages.teacher
        return work / self.cores

    def expected(self, stages: StageSeconds, changed: StageSeconds, **schedule: Any) -> float:
        """Return the seconds of a step with the stages ``changed``; ``stages``: those of the run as it is."""
        schedule = {"staleness": self.staleness, "inflight": self.inflight} | schedule
        return max(step_seconds(changed, **schedule), self.core_seconds(stages))


@dataclass(frozen=True)
class WhatIf:
    """``seconds``: what the model says of a step with it; compare with what it says of the run as it is."""

    text: str
    seconds: float
    at_best: bool = False
    """The change may also give less."""


def usual(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Without those that took more than twice as long as most: the first ones, checkpoints."""
    limit = 2 * statistics.median(step["timing/step"] for step in steps)
    return [step for step in steps if step["timing/step"] <= limit]


def mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    """Of a metric; a step that does not have it has 0."""
    return statistics.fmean(step.get(name, 0.0) for step in steps)


def waited(steps: Sequence[Mapping[str, float]], what: str) -> float:
    """Seconds a step that the trainer waited for one of :data:`WAITS`."""
    return sum(mean(steps, name) for name in WAITS[what])


def stage_seconds(steps: Sequence[Mapping[str, float]]) -> StageSeconds:
    """The stages of some steps of a run, from their metrics.

    A worker counts as busy until its last answer, so that ``generate`` contains the stragglers of a worker; its
    ``latency`` is that of the slowest worker, less the time in which the batch queued behind another one.
    """
    step, sync = mean(steps, "timing/step"), mean(steps, "timing/sync_rollout_weights")
    generate = max(0.0, _busy(steps, "rollout") - sync)
    latency = mean(steps, "timing/generate_sequences")
    slowest = latency - mean(steps, "timing/generate_sequences_mean")
    teacher, tail = _busy(steps, "teacher"), mean(steps, "timing/teacher_tail")
    return StageSeconds(
        generate=generate,
        latency=min(latency, generate + slowest),
        teacher=teacher,
        tail=min(tail, teacher),
        head_start=max(0.0, mean(steps, "timing/get_teacher_knowledge") - tail),
        update=max(0.0, step - sum(waited(steps, what) for what in WAITS)),
        sync=sync,
    )


def _busy(steps: Sequence[Mapping[str, float]], pool: str) -> float:
    """Seconds a step."""
    return statistics.fmean((1 - step[f"perf/idle_{pool}"]) * step["timing/step"] for step in steps)


def no_cost_changes(setup: ResourceLayout, stages: StageSeconds) -> Iterator[WhatIf]:
    """Those that ask for no more devices, except the teacher's."""

    def change(text: str, changed: StageSeconds, staleness: int = setup.staleness) -> WhatIf:
        return WhatIf(text, setup.expected(stages, changed, staleness=staleness))

    n, most = setup.n_teachers, 4 * setup.n_teachers
    if setup.cores is not None and setup.teacher_shares_cores:
        most = min(most, int(setup.cores) - setup.n_slots)
    if more := [change(_teachers(k, n), stages.scaled(teacher=k / n)) for k in range(n + 1, most + 1)]:
        yield _smallest(more)
    if splits := [change(text, stages.scaled(rollout=r, actor=a)) for text, r, a in splits_of(setup)]:
        yield min(splits, key=lambda split: split.seconds)
    staler = setup.staleness + 1
    names = {bound: f"trainer.scheduler={name}" for name, bound in MAX_STALENESS.items()}
    name = names.get(staler, f"trainer.scheduler=n_step_off trainer.max_staleness={staler}")
    yield change(f"{name} (answers up to {staler} update{'s' * (staler > 1)} old)", stages, staler)
    if setup.staleness and not setup.inflight:
        seconds = setup.expected(stages, stages, inflight=True)
        yield WhatIf("trainer.inflight_update=true (an answer may then mix two versions)", seconds)


def larger_buckets(setup: ResourceLayout, stages: StageSeconds, steps: Sequence[Mapping[str, float]]) -> Iterator[WhatIf]:
    """Propose buckets of twice the size if the weights do not fit into one. At best they halve the transfer."""
    syncs = [step for step in steps if MEGABYTES in step and TRANSFER in step]
    if not syncs or mean(syncs, MEGABYTES) * 1e6 <= setup.bucket_megabytes * (1 << 20) or not stages.sync:
        return
    saved = mean(syncs, TRANSFER) / max(mean(syncs, SYNC), 1e-9) / 2
    seconds = setup.expected(stages, stages.scaled(sync=1 / max(1 - saved, 0.5)))
    key = "actor_rollout_ref.rollout.update_weights_bucket_megabytes"
    yield WhatIf(f"{key}={2 * setup.bucket_megabytes:g}", seconds, at_best=True)


def more_devices(setup: ResourceLayout, stages: StageSeconds) -> Iterator[WhatIf]:
    """Propose pools up to twice as large that the cluster has room for."""
    if setup.shared:
        return

    def fits(pool: str, count: int) -> bool:
        actor = (setup.actor[0], count) if pool == "actor" else setup.actor
        rollout = (setup.rollout[0], count) if pool == "rollout" else setup.rollout
        return setup.grants_pools(actor, rollout)

    for pool, key, devices, multiple_of in (
        ("rollout", "rollout", setup.rollout[1], setup.rollout_divisor),
        ("actor", "trainer", setup.actor[1], setup.actor_divisor // math.gcd(setup.actor[0], setup.actor_divisor)),
    ):
        larger = []
        for count in range(devices + 1, 2 * devices + 1):
            if count % multiple_of == 0 and fits(pool, count):
                seconds = setup.expected(stages, stages.scaled(**{pool: count / devices}))
                larger.append(WhatIf(f"{key}.n_gpus_per_node={count}", seconds))
        if larger:
            yield _smallest(larger)


def splits_of(setup: ResourceLayout) -> Iterator[tuple[str, float, float]]:
    """Other ways to share the same devices out: the keys, and the factors of the rollout and of the actor pool.

    Devices of a node if each pool has one node; whole nodes if they are equal; else nothing can move.
    """
    (actor_nodes, actor_each), (rollout_nodes, rollout_each) = setup.actor, setup.rollout
    if setup.shared:
        return
    if actor_nodes == rollout_nodes == 1:
        actor, rollout, each, key = actor_each, rollout_each, 1, "n_gpus_per_node"
    elif actor_each == rollout_each:
        actor, rollout, each, key = actor_nodes, rollout_nodes, actor_each, "nnodes"
    else:
        return
    for new_actor in range(1, actor + rollout):
        new_rollout = actor + rollout - new_actor
        fits = not (new_actor * each % setup.actor_divisor or new_rollout * each % setup.rollout_divisor)
        sizes = [(1, n) if key == "n_gpus_per_node" else (n, each) for n in (new_actor, new_rollout)]
        if fits and new_actor != actor and setup.grants_pools(*sizes):
            yield (f"trainer.{key}={new_actor} rollout.{key}={new_rollout}", new_rollout / rollout, new_actor / actor)


def _smallest(changes: list[WhatIf]) -> WhatIf:
    """The first that is nearly as good as the best."""
    best = min(change.seconds for change in changes)
    return next(change for change in changes if change.seconds <= 1.1 * best)


def _teachers(wanted: int, now: int) -> str:
    workers = "worker" if wanted - now == 1 else "workers"
    return f"actor_rollout_ref.teacher.n_server_workers={wanted} and {wanted - now} more teacher {workers}"
