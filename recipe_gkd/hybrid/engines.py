"""Sleep and wake-up of all rollout engines of a run, driven from outside of their workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.cluster import Cluster
from recipe_gkd.config import Config
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, SYNC_TIMEOUT, timeout_of
from recipe_gkd.errors import WorkerDied
from recipe_gkd.hybrid.sync_probe import mismatch_bound
from recipe_gkd.hybrid.verification import largest_difference
from recipe_gkd.metrics.steps import span
from recipe_gkd.rollout.engine_sleep import Part
from recipe_gkd.rollout.ray_worker import RolloutWorker


class Engines:
    """All rollout engines, which sleep and wake together. Without ``hybrid_engine`` they are always awake.

    Workers that die in a transition are replaced, as far as ``trainer.max_worker_restarts`` allows. A new engine is
    awake and has no weights, so the transition then begins again.

    Args:
        cluster: Connected workers. Engines that can sleep do so.
        ids: Token ids of the fixed request with which engines are verified.

    Attributes:
        state: ``asleep``, ``weights`` (without KV cache), or ``awake``.
        metrics: Times of the transitions, and the result of the last verification.
    """

    def __init__(self, config: Config, cluster: Cluster, ids: Sequence[int]) -> None:
        settings = config.actor_rollout_ref
        self._cluster, self._rollouts, self._ids = cluster, cluster.rollouts, list(ids)
        self._timeout_s, self._actor_timeout_s = timeout_of(config, SYNC_TIMEOUT), timeout_of(config, ACTOR_TIMEOUT)
        self._bound = mismatch_bound(config, cluster)
        self._can_sleep = settings.hybrid_engine and settings.rollout.sleep_level > 0
        self._version = 0
        self._expected: list[float] = []
        self.state: Literal["awake", "weights", "asleep"] = "asleep" if self._can_sleep else "awake"
        self.metrics: dict[str, float] = {}

    async def sleep(self) -> None:
        """Let all engines release their memory."""
        while self._can_sleep and self.state != "asleep":
            with span(self.metrics, "timing/engine_sleep"):
                try:
                    await self._rollouts.call(
                        RolloutWorker.sleep, timeout_s=self._timeout_s, phase="sleep of the rollout engines"
                    )
                    self.state = "asleep"
                except WorkerDied as death:
                    await self._cluster.replace_dead_rollouts(death)

    async def prepare_sync(self) -> None:
        """Allocate the weights of all engines, without their KV cache."""
        await self.sleep()
        while self.state == "asleep":
            with span(self.metrics, "timing/engine_wake"):
                try:
                    await self._wake("weights", "wake-up of the rollout engines (weights)")
                    self.state = "weights"
                except WorkerDied as death:
                    await self._replace(death)

    async def sync(self, version: int) -> dict[str, float]:
        """Send the actor's weights, and return metrics. The engines have memory for them."""
        metrics = await self._cluster.weights.sync(version)
        self._version = version
        if self._can_sleep:
            # Now, because the actor's weights leave the devices before the engines are complete.
            [self._expected], *_ = await self._cluster.actors.call(
                ActorWorker.log_probs,
                [(self._ids[:1], self._ids[1:])],
                timeout_s=self._actor_timeout_s,
                phase=f"log-probabilities of v{version}",
            )
        return metrics

    async def prepare_generation(self) -> None:
        """Wake all engines completely, with the weights of the last sync, and verify them.

        Raises:
            WeightSyncError: An engine has other weights than the actor.
        """
        while self.state != "awake":
            if self.state == "asleep":
                await self.prepare_sync()
                await self.sync(self._version)
            with span(self.metrics, "timing/engine_wake"):
                try:
                    await self._wake("kv_cache", "wake-up of the rollout engines (KV cache)")
                    await self._verify()
                    self.state = "awake"
                except WorkerDied as death:
                    await self._replace(death)

    async def _verify(self) -> None:
        """Compare the log-probabilities of the fixed request with the actor's."""
        got = await self._rollouts.call(
            RolloutWorker.log_probs, self._ids, timeout_s=self._timeout_s, phase="verification of the rollout engines"
        )
        labels = [self._rollouts.label(rank) for rank in range(len(got))]
        difference = largest_difference(self._expected, dict(zip(labels, got, strict=True)), self._bound)
        self.metrics["weights/wake_log_prob_diff"] = difference

    async def _replace(self, death: WorkerDied) -> None:
        """Replace dead workers, and let the others sleep again, because a new engine starts with its KV cache."""
        await self._cluster.replace_dead_rollouts(death)
        self.state = "awake"
        await self.sleep()

    async def _wake(self, part: Part, phase: str) -> None:
        await self._rollouts.call(RolloutWorker.wake, part, timeout_s=self._timeout_s, phase=phase)
