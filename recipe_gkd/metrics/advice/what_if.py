"""Changes to a run that could shorten its steps, each with the step time that the model expects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipe_gkd.config.staleness import MAX_STALENESS
from recipe_gkd.metrics.advice.measured_stages import mean
from recipe_gkd.metrics.advice.resource_layout import ResourceLayout
from recipe_gkd.metrics.advice.step_time_model import StageSeconds
from teacher.common.sizes import MIB

SYNC, TRANSFER = "timing/sync_rollout_weights", "timing/sync_rollout_weights_transfer"
MEGABYTES = "weights/megabytes"
MAX_TEACHER_FACTOR = 4  # proposals have at most this many times the current teacher workers
NEARLY_BEST = 1.1  # the smallest change within this factor of the best step time is proposed


@dataclass(frozen=True)
class WhatIf:
    """A change and its expected effect.

    Attributes:
        text: The keys to set, for the user.
        seconds: Expected step time with the change. Compare it with the expected step time of the unchanged run.
        is_lower_bound: True if ``seconds`` is a lower bound: the change may save less.
    """

    text: str
    seconds: float
    is_lower_bound: bool = False


def no_cost_changes(layout: ResourceLayout, stages: StageSeconds) -> Iterator[WhatIf]:
    """Yield changes that need no more devices for the actor and the rollout workers."""

    def change(text: str, changed: StageSeconds, staleness: int = layout.staleness) -> WhatIf:
        return WhatIf(text, layout.expected(stages, changed, staleness=staleness))

    n, most = layout.n_teachers, MAX_TEACHER_FACTOR * layout.n_teachers if layout.can_add_teachers else 0
    if layout.cores is not None and layout.teacher_shares_cores:
        most = min(most, int(layout.cores) - layout.n_slots)
    if changes := [change(_more_teachers(k, n), stages.scaled(teacher=k / n)) for k in range(n + 1, most + 1)]:
        yield _smallest(changes)
    if splits := [change(text, stages.scaled(rollout=r, actor=a)) for text, r, a in splits_of(layout)]:
        yield min(splits, key=lambda split: split.seconds)
    if layout.takes_turns:
        return
    lag = layout.staleness + 1
    yield change(f"{_schedule(layout, lag)} (responses up to {lag} update{'s' * (lag > 1)} old)", stages, lag)
    if layout.staleness and not layout.inflight:
        seconds = layout.expected(stages, stages, inflight=True)
        yield WhatIf("trainer.inflight_update=true (a response may then mix two versions)", seconds)


def larger_buckets(
    layout: ResourceLayout, stages: StageSeconds, steps: Sequence[Mapping[str, float]]
) -> Iterator[WhatIf]:
    """Yield weight buckets of twice the size if the weights do not fit into one. At best they halve the transfer."""
    syncs = [step for step in steps if MEGABYTES in step and TRANSFER in step]
    if not syncs or mean(syncs, MEGABYTES) * 1e6 <= layout.bucket_megabytes * MIB or not stages.sync:
        return
    saved = mean(syncs, TRANSFER) / max(mean(syncs, SYNC), 1e-9) / 2
    seconds = layout.expected(stages, stages.scaled(sync=1 / max(1 - saved, 0.5)))
    key = "actor_rollout_ref.rollout.update_weights_bucket_megabytes"
    yield WhatIf(f"{key}={2 * layout.bucket_megabytes:g}", seconds, is_lower_bound=True)


def more_devices(layout: ResourceLayout, stages: StageSeconds) -> Iterator[WhatIf]:
    """Yield pools of up to twice the size that the cluster has room for."""
    if layout.shared:
        return

    def fits(pool: str, count: int) -> bool:
        actor = (layout.actor[0], count) if pool == "actor" else layout.actor
        rollout = (layout.rollout[0], count) if pool == "rollout" else layout.rollout
        return layout.grants_pools(actor, rollout)

    actor_multiple = layout.actor_divisor // math.gcd(layout.actor[0], layout.actor_divisor)
    for pool, key, devices, multiple in (
        ("rollout", "rollout", layout.rollout[1], layout.rollout_divisor),
        ("actor", "trainer", layout.actor[1], actor_multiple),
    ):
        larger = []
        for count in range(devices + 1, 2 * devices + 1):
            if count % multiple == 0 and fits(pool, count):
                seconds = layout.expected(stages, stages.scaled(**{pool: count / devices}))
                larger.append(WhatIf(f"{key}.n_gpus_per_node={count}", seconds))
        if larger:
            yield _smallest(larger)


def splits_of(layout: ResourceLayout) -> Iterator[tuple[str, float, float]]:
    """Yield other ways to divide the same devices between the pools.

    Devices move between pools of one node each; whole nodes move between pools with equal nodes. No other layout can be
    divided in another way.

    Yields:
        The keys to set, and the factors by which the rollout pool and the actor pool grow.
    """
    (actor_nodes, actor_each), (rollout_nodes, rollout_each) = layout.actor, layout.rollout
    if layout.shared:
        return
    if actor_nodes == rollout_nodes == 1:
        actor, rollout, per_node, key = actor_each, rollout_each, 1, "n_gpus_per_node"
    elif actor_each == rollout_each:
        actor, rollout, per_node, key = actor_nodes, rollout_nodes, actor_each, "nnodes"
    else:
        return
    for new_actor in range(1, actor + rollout):
        new_rollout = actor + rollout - new_actor
        fits = not (new_actor * per_node % layout.actor_divisor or new_rollout * per_node % layout.rollout_divisor)
        sizes = [(1, n) if key == "n_gpus_per_node" else (n, per_node) for n in (new_actor, new_rollout)]
        if fits and new_actor != actor and layout.grants_pools(*sizes):
            yield (f"trainer.{key}={new_actor} rollout.{key}={new_rollout}", new_rollout / rollout, new_actor / actor)


def _smallest(changes: list[WhatIf]) -> WhatIf:
    """Return the first change that is nearly as good as the best one."""
    best = min(change.seconds for change in changes)
    return next(change for change in changes if change.seconds <= NEARLY_BEST * best)


def _schedule(layout: ResourceLayout, lag: int) -> str:
    """Return the keys of a schedule with this maximum policy lag."""
    if layout.is_n_step_off:
        return f"trainer.max_staleness={lag}"
    names: dict[int, str] = {bound: f"trainer.scheduler={name}" for name, bound in MAX_STALENESS.items()}
    return names.get(lag, f"trainer.scheduler=n_step_off trainer.max_staleness={lag}")


def _more_teachers(wanted: int, present: int) -> str:
    workers = "worker" if wanted - present == 1 else "workers"
    return f"actor_rollout_ref.teacher.n_server_workers={wanted} and {wanted - present} more teacher {workers}"
