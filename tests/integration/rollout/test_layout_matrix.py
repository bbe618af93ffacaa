"""Tests of weight syncs from every layout of a Megatron actor to every kind of engine, compared with its export."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen2ForCausalLM

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.rollout_models import config_for, prompts, reference_logps
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import OLD, Pool, environment, generate_on, make_synchronizer
from tests.integration.rollout.reusable_actors import ReusableActorWorker, start_trained_actor

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
ProcessesFor = Callable[[int], list[Any]]
"""Function that returns processes for the first n ranks, and starts them if needed."""


class FreshEngines:
    """A process for one engine after another, each loaded by vLLM from a folder."""

    def __init__(self) -> None:
        from recipe_gkd.rollout.vllm import compat  # noqa: F401 - imported while other processes start

    async def responses(self, folder: str, given: list[Prompt]) -> dict[int, Response]:
        worker = RolloutWorker(config_for(Path(folder)), rank=0, device="cpu", folder_version=0)
        await worker.setup()
        found = {
            response.uid: response async for batch in worker.generate(given, 0, "validation") for response in batch
        }
        await worker.shutdown()
        return found


@pytest.fixture(scope="module")
def processes_for(ray_session: None) -> Iterator[ProcessesFor]:
    env = {"env_vars": actor_environment("cpu")}
    processes: list[Any] = []

    def first(n: int) -> list[Any]:
        while len(processes) < n:
            processes.append(ray.remote(num_cpus=0, runtime_env=env)(ReusableActorWorker).remote())
        return processes[:n]

    yield first
    for process in processes:
        ray.kill(process)


@pytest.fixture(scope="module")
def fresh(ray_session: None) -> Iterator[Any]:
    engine: Any = ray.remote(num_cpus=0, runtime_env=environment())(FreshEngines).remote()
    yield engine
    ray.kill(engine)


def actor_config(folders: Any, n: int, overrides: list[str]) -> Config:
    return config_for(
        folders[OLD, True], f"trainer.n_gpus_per_node={n}", f"{MEGATRON}.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.01", "actor_rollout_ref.nccl_timeout=60", *overrides,
    )  # fmt: skip


async def sync_all(actor: WorkerGroup, engines: list[tuple[str, WorkerGroup, int]]) -> dict[str, dict[int, Response]]:
    """Return the greedy responses of each engine after a sync. ``engines``: name, group, tensor-parallel size."""
    found: dict[str, dict[int, Response]] = {}
    for name, group, tp in engines:
        sync = make_synchronizer(actor, group, tensor_parallel_size=tp)
        version = 10 + len(found)
        await sync.sync(version)
        for rank in range(len(group)):
            found[f"{name}, {rank}"] = responses = await generate_on(group, rank, GIVEN, greedy=True)
            assert {response.weights_version for response in responses.values()} == {version}
    return found


@pytest.mark.slow  # Exports of all layouts are tested in tests/integration/actor.
def test_sync_from_tp2_actor_matches_transformers(
    processes_for: ProcessesFor, pool: Pool, tensor_pair: WorkerGroup, folders: Any, tmp_path: Path
) -> None:
    export = str(tmp_path / "export")

    async def sync_and_export() -> dict[str, dict[int, Response]]:
        actor = await start_trained_actor(processes_for(2), actor_config(folders, 2, [TP2]), 2)
        try:
            await actor.call(ReusableActorWorker.save_hf, export, timeout_s=PATIENCE_S, phase="export")
            return await sync_all(actor, [("1 worker", pool.group(0), 1), ("TP2", tensor_pair, 2)])
        finally:
            await actor.call(ReusableActorWorker.leave, timeout_s=PATIENCE_S, phase="leave")

    found = asyncio.run(sync_and_export())
    model = Qwen2ForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    for name, responses in found.items():
        for prompt in GIVEN:
            response = responses[prompt.uid]
            logps_TV = reference_logps(model, prompt, response)
            expected_T = logps_TV[np.arange(len(response.ids)), response.ids]
            np.testing.assert_allclose(response.logprobs, expected_T, atol=1e-4, rtol=0, err_msg=name)
            np.testing.assert_allclose(expected_T, logps_TV.max(1), atol=1e-4, rtol=0, err_msg=name)
    assert not all(np.array_equal(pool.fresh[0][uid].ids, response.ids) for uid, response in found["TP2, 0"].items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sync_from_any_layout_matches_engine_of_export(
    layout: str,
    processes_for: ProcessesFor,
    fresh: Any,
    pool: Pool,
    tensor_pair: WorkerGroup,
    folders: Any,
    tmp_path: Path,
) -> None:
    n, overrides = LAYOUTS[layout]
    export = str(tmp_path / "export")
    engines = [("1 worker", pool.group(0), 1), ("2 workers", pool.group(0, 1), 1), ("TP2", tensor_pair, 2)]

    async def sync_and_export() -> tuple[dict[int, Response], dict[str, dict[int, Response]]]:
        actor = await start_trained_actor(processes_for(n), actor_config(folders, n, overrides), n)
        try:
            await actor.call(ReusableActorWorker.save_hf, export, timeout_s=PATIENCE_S, phase="export")
            expected = fresh.responses.remote(export, GIVEN)
            found = await sync_all(actor, engines)
            return await expected, found
        finally:
            await actor.call(ReusableActorWorker.leave, timeout_s=PATIENCE_S, phase="leave")

    expected, found = asyncio.run(sync_and_export())
    assert len(found) == 4
    for name, responses in found.items():
        for uid, response in responses.items():
            assert np.array_equal(response.ids, expected[uid].ids), name
            np.testing.assert_allclose(response.logprobs, expected[uid].logprobs, atol=1e-5, rtol=0, err_msg=name)
    assert not all(np.array_equal(pool.fresh[0][uid].ids, response.ids) for uid, response in expected.items())
