"""From every layout of a real Megatron actor to every set of engines: what they then say is what its export says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from actor_seats import ActorSeat, trained
from conftest import CHANNEL_TIMEOUT_S, OLD, Pool, answers_of, environment
from small_models import config_for, prompts

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.groups import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.samples import Answer, Prompt
from recipe_gkd.weights.sync import WeightSync

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

MEGATRON = "actor_rollout_ref.actor.megatron"
TP2, PP2 = f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2"
VPP2 = f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "TP1": (1, []),
    "TP2": (2, [TP2]),
    "PP2": (2, [PP2]),
    "PP2, VPP2": (2, [PP2, VPP2]),
    "TP2xPP2": (4, [TP2, PP2]),
}
GIVEN = prompts(12)


class FreshEngines:
    """A process for one engine after the other, each loaded by vLLM from a folder."""

    def __init__(self) -> None:
        from recipe_gkd.rollout import vllm_compat  # noqa: F401 - while other processes start

    async def answers(self, folder: str, given: list[Prompt]) -> dict[int, Answer]:
        worker = RolloutWorker(config_for(Path(folder)), rank=0, device="cpu", folder_version=0)
        await worker.setup()
        found = {answer.uid: answer async for batch in worker.generate(given, 0, "validation") for answer in batch}
        await worker.shutdown()
        return found


@pytest.fixture(scope="module")
def seats(ray_session: None) -> Iterator[list[Any]]:
    env = {"env_vars": actor_environment("cpu") | {"PYTHONPATH": environment()["env_vars"]["PYTHONPATH"]}}
    seats: list[Any] = [ray.remote(num_cpus=0, runtime_env=env)(ActorSeat).remote() for _ in range(4)]
    yield seats
    for seat in seats:
        ray.kill(seat)


@pytest.fixture(scope="module")
def fresh(ray_session: None) -> Iterator[Any]:
    engine: Any = ray.remote(num_cpus=0, runtime_env=environment())(FreshEngines).remote()
    yield engine
    ray.kill(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_after_a_sync_say_what_a_fresh_engine_says_of_the_export(
    layout: str, seats: list[Any], fresh: Any, pool: Pool, tensor_pair: WorkerGroup, folders: Any, tmp_path: Path
) -> None:
    n, overrides = LAYOUTS[layout]
    config = config_for(
        folders[OLD, True], f"trainer.n_gpus_per_node={n}", f"{MEGATRON}.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.01", "actor_rollout_ref.nccl_timeout=20", *overrides,
    )  # fmt: skip
    export = str(tmp_path / "export")

    async def sync_all(actor: WorkerGroup) -> dict[str, dict[int, Answer]]:
        found: dict[str, dict[int, Answer]] = {}
        for name, group, tp in [
            ("1 worker", pool.group(0), 1),
            ("2 workers", pool.group(0, 1), 1),
            ("TP2", tensor_pair, 2),
        ]:
            sync = WeightSync(
                actor,
                group,
                tensor_parallel_size=tp,
                bucket_bytes=30_000,
                timeout_s=CHANNEL_TIMEOUT_S,
                transport="collective",
            )
            version = 10 + len(found)
            await sync.sync(version)
            for rank in range(len(group)):
                found[f"{name}, {rank}"] = answers = await answers_of(group, rank, GIVEN, greedy=True)
                assert {answer.weights_version for answer in answers.values()} == {version}
        return found

    async def sync_and_export() -> tuple[dict[int, Answer], dict[str, dict[int, Answer]]]:
        actor = await trained(seats, config, n)
        try:
            await actor.call("save_hf", export, timeout_s=30, phase="export")
            expected = fresh.answers.remote(export, GIVEN)
            found = await sync_all(actor)
            return await expected, found
        finally:
            await actor.call("stand_up", timeout_s=20, phase="stand up")

    expected, found = asyncio.run(sync_and_export())
    assert len(found) == 4
    for name, answers in found.items():
        for uid, answer in answers.items():
            assert np.array_equal(answer.ids, expected[uid].ids), name
            np.testing.assert_allclose(answer.logprobs, expected[uid].logprobs, atol=1e-5, rtol=0, err_msg=name)
    assert not all(np.array_equal(pool.fresh[0][uid].ids, answer.ids) for uid, answer in expected.items())
