"""An FSDP actor and a rollout worker with an engine, in processes that serve one model after another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.actor.ranks import leave_ranks
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Response
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.rollout_models import prompts, reference_logps
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import environment, generate_on, make_synchronizer
from tests.integration.rollout.reusable_actors import samples

FSDP = [
    "actor_rollout_ref.actor.strategy=fsdp", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=0.003", "actor_rollout_ref.nccl_timeout=60",
]  # fmt: skip
GIVEN = prompts(12)


class ReusableFsdpWorker(ActorWorker):
    """A process for one actor of one rank after another."""

    def __init__(self) -> None:
        from recipe_gkd.actor.fsdp import backend  # noqa: F401 - imported while other processes start

    def configure(self, config: Config) -> None:
        super().__init__(config, total_steps=10, rank=0, world_size=1, device="cpu")

    def leave(self) -> None:
        self._weights.close()
        leave_ranks()


class ReusableRolloutWorker(RolloutWorker):
    """A process for one engine after another."""

    def __init__(self) -> None:
        from recipe_gkd.rollout.vllm import compat  # noqa: F401 - imported while other processes start

    async def configure(self, config: Config) -> None:
        super().__init__(config, rank=0, device="cpu", folder_version=0)


@dataclass
class Workers:
    """An actor and a rollout worker, for one model after another."""

    actor: WorkerGroup[ReusableFsdpWorker]
    rollout: WorkerGroup[ReusableRolloutWorker]

    async def train_and_sync(self, config: Config, export: Path) -> tuple[dict[int, Response], dict[int, Response]]:
        """Return the greedy responses before, and after 3 updates and a sync. The trained model is in ``export``."""
        try:
            await self._start(config)
            before = await generate_on(self.rollout, 0, GIVEN, greedy=True)
            for step in range(3):
                await self.actor.call(ReusableFsdpWorker.update, samples(8), step, timeout_s=PATIENCE_S, phase="update")
            await self.actor.call(ReusableFsdpWorker.save_hf, str(export), timeout_s=PATIENCE_S, phase="export")
            await make_synchronizer(self.actor, self.rollout).sync(7)
            return before, await generate_on(self.rollout, 0, GIVEN, greedy=True)
        finally:
            await asyncio.gather(
                self.actor.call(ReusableFsdpWorker.leave, timeout_s=PATIENCE_S, phase="leave"),
                self.rollout.call(ReusableRolloutWorker.shutdown, timeout_s=PATIENCE_S, phase="shutdown"),
            )

    async def _start(self, config: Config) -> None:
        async def start_actor() -> None:
            await self.actor.call(ReusableFsdpWorker.configure, config, timeout_s=PATIENCE_S, phase="configure")
            address = await self.actor.call_one(
                0, ReusableFsdpWorker.rendezvous, timeout_s=PATIENCE_S, phase="rendezvous"
            )
            await self.actor.call(ReusableFsdpWorker.setup, address, timeout_s=PATIENCE_S, phase="setup")

        async def start_engine() -> None:
            await self.rollout.call(ReusableRolloutWorker.configure, config, timeout_s=PATIENCE_S, phase="configure")
            await self.rollout.call(ReusableRolloutWorker.setup, timeout_s=PATIENCE_S, phase="setup")

        await asyncio.gather(start_actor(), start_engine())


@contextmanager
def running_workers() -> Iterator[Workers]:
    """Start both processes in the running Ray cluster, and kill them at the end."""
    actor: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": actor_environment("cpu")})(ReusableFsdpWorker)
    rollout: Any = ray.remote(num_cpus=0, runtime_env=environment())(ReusableRolloutWorker)
    handles = [actor.remote(), rollout.remote()]
    yield Workers(WorkerGroup("actor", handles[:1]), WorkerGroup("rollout", handles[1:]))
    for handle in handles:
        ray.kill(handle)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return a model of transformers, and what differed from its folder. "sdpa" would omit Gemma2's soft cap."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return loaded


def assert_computed_by(model: Any, responses: dict[int, Response]) -> None:
    """Compare log-probabilities with those of a model of transformers. The responses are its most likely ones."""
    for prompt in GIVEN:
        response = responses[prompt.uid]
        logps_TV = reference_logps(model, prompt, response)
        expected_T = logps_TV[np.arange(len(response.ids)), response.ids]
        np.testing.assert_allclose(response.logprobs, expected_T, atol=1e-4, rtol=0)
        np.testing.assert_allclose(expected_T, logps_TV.max(1), atol=1e-4, rtol=0)
