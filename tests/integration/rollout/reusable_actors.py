"""Processes that run one Megatron actor after another: each is trained for one step, then closed."""

from __future__ import annotations

from typing import Any

import numpy as np

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Response, Sample, TeacherTopK
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from tests._support.rollout_models import VOCABULARY, prompts
from tests._support.waiting import PATIENCE_S


class ReusableActorWorker(ActorWorker):
    """A process for a rank of one actor after another: the import of Megatron takes longer than a test of a layout."""

    def __init__(self) -> None:
        from recipe_gkd.actor.megatron import backend  # noqa: F401 - imported while other processes start

    def configure(self, config: Config, rank: int, world_size: int) -> None:
        super().__init__(config, total_steps=10, rank=rank, world_size=world_size, device="cpu")

    def leave(self) -> None:
        from recipe_gkd.actor.megatron.parallel import destroy_parallel

        self._weights.close()
        destroy_parallel()


def samples(n: int) -> list[Sample]:
    """Return samples with random responses and a random teacher top-4."""
    rng = np.random.default_rng(0)
    result = []
    for prompt in prompts(n):
        ids = rng.integers(0, VOCABULARY, 10).astype(np.int32)
        zeros, no_versions = np.zeros(10, np.float32), np.zeros(10, np.int32)
        top = np.sort(rng.normal(size=(10, 4)).astype(np.float32) - 4)[:, ::-1]
        top_ids = np.stack([rng.permutation(VOCABULARY)[:4] for _ in ids]).astype(np.int32)
        response = Response(
            uid=prompt.uid, ids=ids, logprobs=zeros, finish_reason="stop", weights_version=0, versions_T=no_versions
        )
        result.append(
            Sample(
                prompt=prompt,
                response=response,
                teacher=TeacherTopK(logps_TK=top, ids_TK=top_ids, sampled_logps_T=zeros),
            )
        )
    return result


async def start_trained_actor(processes: list[Any], config: Config, n: int) -> WorkerGroup[ReusableActorWorker]:
    """Return an actor of ``n`` ranks after one update."""
    actor: WorkerGroup[ReusableActorWorker] = WorkerGroup("actor", processes[:n])
    await actor.call_each(
        ReusableActorWorker.configure, [(config, rank, n) for rank in range(n)], timeout_s=PATIENCE_S, phase="configure"
    )
    address = await actor.call_one(0, ReusableActorWorker.rendezvous, timeout_s=PATIENCE_S, phase="rendezvous")
    await actor.call(ReusableActorWorker.setup, address, timeout_s=PATIENCE_S, phase="setup")
    await actor.call(ReusableActorWorker.update, samples(8), 0, timeout_s=PATIENCE_S, phase="update")
    return actor
