"""What could be changed about a run to make its steps shorter, and what the model of a step expects of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipe_gkd.bounds import StageSeconds, step_seconds
from recipe_gkd.config import Config
from recipe_gkd.flow import MAX_STALENESS, staleness_bound

WAITS = {
    "generation": ("timing/wait_prev_gen",),
    "teacher": ("timing/wait_prev_teacher", "timing/wait_prev_prev_teacher"),
    "sync": ("timing/wait_sync",),
    "reward": ("timing/wait_reward",),
}
"""What the trainer may wait for, and the metrics of that."""
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


@dataclass(frozen=True, kw_only=True)
class Setup:
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

    @classmethod
    def of(cls, config: Config) -> Setup:
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
        )


@dataclass(frozen=True)
class Change:
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


def free_changes(setup: Setup, stages: StageSeconds) -> Iterator[Change]:
    """Those that ask for no more devices, except the teacher's."""

    def change(text: str, stages: StageSeconds, staleness: int = setup.staleness, at_best: bool = False) -> Change:
        return Change(text, step_seconds(stages, staleness, inflight=setup.inflight), at_best)

    n = setup.n_teachers
    more = {k: change(_teachers(k, n), stages.scaled(teacher=k / n)) for k in range(n + 1, 4 * n + 1)}
    yield _smallest(list(more.values()))
    if splits := [change(text, stages.scaled(rollout=r, actor=a)) for text, r, a in splits_of(setup)]:
        yield min(splits, key=lambda split: split.seconds)
    staler = setup.staleness + 1
    names = {bound: f"trainer.scheduler={name}" for name, bound in MAX_STALENESS.items()}
    name = names.get(staler, f"trainer.scheduler=n_step_off trainer.max_staleness={staler}")
    yield change(f"{name} (answers up to {staler} update{'s' * (staler > 1)} old)", stages, staler)
    if setup.staleness and not setup.inflight:
        seconds = step_seconds(stages, setup.staleness, inflight=True)
        yield Change("trainer.inflight_update=true (an answer may then mix two versions)", seconds)
    bucket = f"actor_rollout_ref.rollout.update_weights_bucket_megabytes={2 * setup.bucket_megabytes:g}"
    yield change(bucket, stages.scaled(sync=2), at_best=True)


def more_devices(setup: Setup, stages: StageSeconds) -> Iterator[Change]:
    """Pools up to twice as large."""
    if setup.shared:
        return
    for pool, key, devices, multiple_of in (
        ("rollout", "rollout", setup.rollout[1], setup.rollout_divisor),
        ("actor", "trainer", setup.actor[1], setup.actor_divisor // math.gcd(setup.actor[0], setup.actor_divisor)),
    ):
        larger = []
        for count in range(devices + 1, 2 * devices + 1):
            if count % multiple_of == 0:
                grown = stages.scaled(**{pool: count / devices})
                seconds = step_seconds(grown, setup.staleness, inflight=setup.inflight)
                larger.append(Change(f"{key}.n_gpus_per_node={count}", seconds))
        if larger:
            yield _smallest(larger)


def splits_of(setup: Setup) -> Iterator[tuple[str, float, float]]:
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
        if fits and new_actor != actor:
            yield (f"trainer.{key}={new_actor} rollout.{key}={new_rollout}", new_rollout / rollout, new_actor / actor)


def _smallest(changes: list[Change]) -> Change:
    """The first that is nearly as good as the best."""
    best = min(change.seconds for change in changes)
    return next(change for change in changes if change.seconds <= 1.1 * best)


def _teachers(wanted: int, now: int) -> str:
    workers = "worker" if wanted - now == 1 else "workers"
    return f"actor_rollout_ref.teacher.n_server_workers={wanted} and {wanted - now} more teacher {workers}"
