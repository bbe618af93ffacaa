"""A rollout engine that sleeps and wakes on a GPU: memory, weights, log-probabilities, and several cycles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from recipe_gkd.commands.gpu_smoke.reference import sampled_logps
from recipe_gkd.errors import WeightSyncError
from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.engine_sleep import EngineSleep
from recipe_gkd.rollout.weight_updates import WeightUpdates
from tests._support.errors import raises
from tests._support.rollout_models import VOCABULARY, config_for, make_model
from tests._support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

CACHE_BYTES = 1 << 30
OLD, NEW = 1, 2
IDS = [5, 17, 203, 4, 4, 299, 18, 30]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutEngine]:
    folder = tmp_path_factory.mktemp("model")
    make_model(OLD, tied=False).save_pretrained(folder)
    config = config_for(
        folder, "actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync",
        f"actor_rollout_ref.rollout.kv_cache_memory_megabytes={CACHE_BYTES >> 20}",
        "actor_rollout_ref.rollout.enforce_eager=false",
    )  # fmt: skip
    engine = RolloutEngine(EngineOptions.from_config(config, "cuda", VOCABULARY))
    try:
        engine.start().result(timeout=PATIENCE_S)
        yield engine
    finally:
        engine.close()


def log_probs_error(engine: RolloutEngine, seed: int) -> float:
    expected = sampled_logps(make_model(seed, tied=False), IDS, prompt_len=1)
    found = engine.log_probs(IDS).result(timeout=PATIENCE_S)
    return float(np.abs(expected - np.asarray(found)).max())


def _load(rank: Any, seed: int) -> None:
    """Reload the weights of a rank through the layerwise reload of a weight update."""
    from recipe_gkd.rollout.vllm.compat import set_current_vllm_config

    receiver = rank.weight_transfer_engine
    state = make_model(seed, tied=False).state_dict()
    with set_current_vllm_config(rank.vllm_config):
        receiver._load([(name, tensor.cuda()) for name, tensor in state.items()])
        receiver.finish_weight_update()


def load(engine: RolloutEngine, seed: int) -> None:
    engine.run(lambda inner: inner.collective_rpc(partial(_load, seed=seed))).result(PATIENCE_S)


@pytest.fixture
def parts(engine: RolloutEngine) -> tuple[EngineSleep, WeightUpdates]:
    """Return the states of an engine with the weights OLD."""
    updates = WeightUpdates("rollout worker 0")
    load(engine, OLD)
    engine.run(lambda inner: updates.set_version(inner, 0)).result(PATIENCE_S)
    return EngineSleep("rollout worker 0", updates), updates


@pytest.mark.parametrize("level", [1, 2])
def test_cycles_restore_the_engine_and_do_not_leak(
    engine: RolloutEngine, parts: tuple[EngineSleep, WeightUpdates], level: int
) -> None:
    state, updates = parts
    assert log_probs_error(engine, OLD) < 0.05
    free = []
    for seed in (NEW, OLD, NEW, OLD):
        slept = engine.run(lambda inner: state.sleep(inner, level)).result(PATIENCE_S)
        assert slept.released_bytes > 0.9 * CACHE_BYTES
        free.append(torch.cuda.mem_get_info()[0])
        engine.run(lambda inner: state.wake(inner, "weights")).result(PATIENCE_S)
        if level == 2:
            with raises(WeightSyncError, invalid=("rollout worker 0",), tensors=()):
                updates.ensure_valid()
        load(engine, seed)
        engine.run(lambda inner: updates.set_version(inner, 1)).result(PATIENCE_S)
        engine.run(lambda inner: state.wake(inner, "kv_cache")).result(PATIENCE_S)
        assert log_probs_error(engine, seed) < 0.05
    assert free[1] - free[3] < 8 << 20, "expected the same free memory after the second and the fourth sleep"


def test_level_1_wakes_with_the_same_weights(engine: RolloutEngine, parts: tuple[EngineSleep, WeightUpdates]) -> None:
    state, _ = parts
    before = engine.log_probs(IDS).result(timeout=PATIENCE_S)
    engine.run(lambda inner: state.sleep(inner, 1)).result(PATIENCE_S)
    engine.run(lambda inner: state.wake(inner, "weights")).result(PATIENCE_S)
    engine.run(lambda inner: state.wake(inner, "kv_cache")).result(PATIENCE_S)
    assert engine.log_probs(IDS).result(timeout=PATIENCE_S) == before


def test_level_1_changed_parameter_is_found(engine: RolloutEngine, parts: tuple[EngineSleep, WeightUpdates]) -> None:
    state, _ = parts
    engine.run(lambda inner: state.sleep(inner, 1)).result(PATIENCE_S)
    engine.run(lambda inner: inner.collective_rpc(_change_backup)).result(PATIENCE_S)
    with raises(WeightSyncError, invalid=("rollout worker 0",)) as caught:
        engine.run(lambda inner: state.wake(inner, "weights")).result(PATIENCE_S)
    assert caught.value.tensors
    engine.run(lambda inner: state.wake(inner, "kv_cache")).result(PATIENCE_S)


def _change_backup(rank: Any) -> None:
    """Change the copy of the largest parameter that vLLM keeps in host memory."""
    from vllm.device_allocator.cumem import CuMemAllocator

    largest = max(rank.model_runner.model.parameters(), key=lambda parameter: parameter.nbytes)
    for start, data in CuMemAllocator.get_instance().pointer_to_data.items():
        if start <= largest.data_ptr() < start + data.handle[1]:
            assert data.cpu_backup_tensor is not None
            data.cpu_backup_tensor[largest.data_ptr() - start] ^= 1
            return
    raise AssertionError("the parameter is not in the memory pool of the sleep mode")
