"""Tests of ``lora.sync=adapter``: only the adapters travel, and the engine computes what the merged weights compute."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.data.samples import Response
from recipe_gkd.errors import WeightSyncError
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from tests._support.families import BY_TYPE, FAMILIES, Family, make_family_folder
from tests._support.rollout_models import config_for, make_model
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import environment, generate_on, make_synchronizer
from tests.integration.rollout.fsdp_workers import (
    FSDP,
    GIVEN,
    ReusableRolloutWorker,
    Workers,
    assert_computed_by,
    load,
    running_workers,
)
from tests.integration.rollout.reusable_actors import ReusableActorWorker, start_trained_actor

ADAPTERS = [
    "actor_rollout_ref.actor.lora.rank=6", "actor_rollout_ref.actor.lora.alpha=20",
    "actor_rollout_ref.actor.lora.sync=adapter",
]  # fmt: skip
DEFAULT = "qwen2_moe"
TARGETS = "actor_rollout_ref.actor.lora.target_modules"
LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
"""Families of which vLLM adds no adapters to one layer."""
SERVED = [family for family in FAMILIES if not (family.fsdp or family.lora or family.rollout)]


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[Workers]:
    with running_workers() as running:
        yield running


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each is BY_TYPE[DEFAULT] else pytest.mark.slow) for each in SERVED],
    ids=lambda family: family.model_type,
)
def test_engine_computes_the_merged_model(family: Family, workers: Workers, tmp_path: Path) -> None:
    folder, export = make_family_folder(tmp_path / "model", family, family.rollout_config), tmp_path / "export"
    others = [f"{TARGETS}=[kv_a_proj_with_mqa,o_proj,gate_proj,up_proj,down_proj]"]
    config = config_for(folder, *FSDP, *ADAPTERS, *(others if family.model_type in LATENT else []))
    before, after = asyncio.run(workers.train_and_sync(config, export))
    assert_computed_by(load(folder)[0], before)
    assert_computed_by(load(export)[0], after)
    assert {response.weights_version for response in after.values()} == {7}
    assert not all(np.array_equal(before[uid].ids, response.ids) for uid, response in after.items())


@pytest.mark.slow
def test_layer_without_adapters_in_vllm_is_refused_by_name(workers: Workers, tmp_path: Path) -> None:
    """Latent attention computes with the weight of the layer, not with the layer."""
    folder = make_family_folder(tmp_path / "model", BY_TYPE["deepseek_v3"])
    with pytest.raises(WeightSyncError, match=r"kv_b_proj.*lora\.sync=merged"):
        asyncio.run(workers.train_and_sync(config_for(folder, *FSDP, *ADAPTERS), tmp_path / "export"))


@pytest.fixture
def processes(ray_session: None) -> Iterator[list[Any]]:
    """Return two actor processes and one for an engine with two tensor-parallel ranks."""
    actor: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": actor_environment("cpu")})(ReusableActorWorker)
    rollout: Any = ray.remote(num_cpus=0, runtime_env=environment())(ReusableRolloutWorker)
    started = [actor.remote(), actor.remote(), rollout.remote()]
    yield started
    for process in started:
        ray.kill(process)


@pytest.mark.slow
def test_engine_of_two_ranks_keeps_the_adapters_of_megatron(processes: list[Any], tmp_path: Path) -> None:
    """Sync from two tensor-parallel ranks of the actor; a dropped update then changes nothing."""
    make_model(0, tied=True).save_pretrained(tmp_path / "model")
    config = config_for(
        tmp_path / "model", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "rollout.n_gpus_per_node=2", *ADAPTERS,
    )  # fmt: skip
    engine: WorkerGroup[ReusableRolloutWorker] = WorkerGroup("rollout", processes[2:])

    async def sync_twice() -> list[dict[int, Response]]:
        await engine.call(ReusableRolloutWorker.configure, config, timeout_s=PATIENCE_S, phase="configure")
        await engine.call(ReusableRolloutWorker.setup, timeout_s=PATIENCE_S, phase="setup")
        found = [await generate_on(engine, 0, GIVEN, greedy=True)]
        actor = await start_trained_actor(processes[:2], config, 2)
        metrics = await make_synchronizer(actor, engine, tensor_parallel_size=2).sync(7)
        found.append(await generate_on(engine, 0, GIVEN, greedy=True))
        await actor.call(ReusableActorWorker.save_hf, str(tmp_path / "export"), timeout_s=PATIENCE_S, phase="export")
        [invalid] = await engine.call(ReusableRolloutWorker.drop_weights, timeout_s=PATIENCE_S, phase="drop")
        assert invalid is None and metrics["weights/double_buffered_workers"] == 1
        found.append(await generate_on(engine, 0, GIVEN, greedy=True))
        await actor.call(ReusableActorWorker.leave, timeout_s=PATIENCE_S, phase="leave")
        await engine.call(ReusableRolloutWorker.shutdown, timeout_s=PATIENCE_S, phase="shutdown")
        return found

    before, after, kept = asyncio.run(sync_twice())
    assert_computed_by(load(tmp_path / "model")[0], before)
    assert_computed_by(load(tmp_path / "export")[0], after)
    assert_computed_by(load(tmp_path / "export")[0], kept)
    assert not all(np.array_equal(before[uid].ids, response.ids) for uid, response in after.items())
