"""An engine of two worker processes: the same answers, and a weight update that reaches both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import ray
from conftest import CHANNEL_TIMEOUT_S, NEW, OLD, Pool, environment
from small_models import config_for, model_of, prompts, reference_logprobs

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.groups import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.samples import Answer
from recipe_gkd.weights.sync import WeightSync


@pytest.mark.timeout(240)
def test_two_tensor_ranks_generate_and_are_updated_as_one(pool: Pool, folders: dict[tuple[int, bool], Path]) -> None:
    config = config_for(
        folders[OLD, True],
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        f"actor_rollout_ref.nccl_timeout={CHANNEL_TIMEOUT_S}",
    )
    worker = ray.remote(num_cpus=0, runtime_env=environment())(RolloutWorker).remote(config, rank=0, device="cpu")
    group = WorkerGroup("rollout", [worker])
    given = prompts(12)

    async def answers() -> dict[int, Answer]:
        stream = group.stream(0, "generate", given, 0, timeout_s=60, phase="generate")
        return {answer.uid: answer async for batch in stream for answer in batch}

    def check(seed: int, version: int) -> None:
        model, found = model_of(seed, tied=True), asyncio.run(answers())
        for prompt in given:
            answer = found[prompt.uid]
            assert answer.weights_version == version
            np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, prompt, answer), atol=1e-4)

    try:
        ray.get(worker.setup.remote(), timeout=150)
        check(OLD, 0)
        pool.tell_actor("become", NEW, True)
        sync = WeightSync(pool.actor, group, tensor_parallel_size=2, bucket_bytes=30_000, timeout_s=CHANNEL_TIMEOUT_S)
        asyncio.run(sync.sync(3))
        check(NEW, 3)
        pool.tell_actor("become", OLD, True)
        pool.tell_actor("misbehave", 8, 0.0)
        with pytest.raises(WeightSyncError, match=r"rollout worker 0: .*the export broke.*holds a mixture"):
            asyncio.run(sync.sync(4))
        check(NEW, 3)
        asyncio.run(sync.sync(5))
        check(OLD, 5)
        asyncio.run(group.call("shutdown", timeout_s=30, phase="shutdown"))
    finally:
        ray.kill(worker)
