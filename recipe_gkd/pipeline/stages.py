"""Signatures of the stages that the schedule calls. The pipeline imports no worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from recipe_gkd.data.samples import Prompt, Response, Reward, Sample
from recipe_gkd.errors import WorkerDied

Generate = Callable[[int, Sequence[Prompt], int], AsyncIterator[list[Response]]]
Score = Callable[[Sequence[tuple[Prompt, Response]], int], Awaitable[list[Sample]]]
ComputeRewards = Callable[[Sequence[tuple[Prompt, Response]]], Awaitable[dict[int, Reward]]]
Sync = Callable[[int], Awaitable[dict[str, float]]]
Replace = Callable[[WorkerDied], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class PipelineStages:
    """Asynchronous functions that do the work of each stage.

    Attributes:
        generate: ``generate(replica, prompts, step)`` yields the responses of a rollout replica as they finish, in any
            order. It raises :class:`WorkerDied` if the worker of the replica has died.
        score: ``score(group, step)`` returns the samples of a group of responses. It makes one request per teacher.
        sync: ``sync(version)`` sends the actor's weights to all replicas as ``version`` and returns metrics.
        compute_rewards: ``compute_rewards(group)`` returns the rewards of a group of responses by uid. Responses may
            have no reward. None if the run computes no rewards.
        replace: ``replace(death)`` replaces dead rollout workers. New workers start without weights. It raises an error
            if no worker may be replaced. None if workers are never replaced.
    """

    generate: Generate
    score: Score
    sync: Sync
    compute_rewards: ComputeRewards | None = None
    replace: Replace | None = None
