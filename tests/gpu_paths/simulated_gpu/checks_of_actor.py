"""The actor on the simulated GPU, where it differs from a CPU. ``tests/gpu_paths/test_simulated_gpu.py`` runs them.

The other properties are those of ``tests/integration/actor``, whose tests run on the simulated GPU too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests._support.layouts import BF16, CP2, PP2, SP, TP2
from tests._support.tiny_models import ACTOR, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.gpu_paths.simulated_gpu import actor_jobs
from tests.integration.actor.conftest import folders, pool

__all__ = ["folders", "pool"]  # fixtures

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=bfloat16"]
SMALL_ROWS = f"{ACTOR}.max_token_len=32"  # several micro-batches
SETTINGS: dict[str, tuple[int, list[str]]] = {
    "Megatron": (1, [BF16]),
    "Megatron, temperature, fused head": (1, [BF16, "gkd.distill_temperature=2.0", "gkd.fuse_lm_head=true"]),
    "Megatron, tensor 2, sequence parallel": (2, [BF16, TP2, SP]),
    "Megatron, context 2": (2, [BF16, CP2]),
    "Megatron, pipeline 2": (2, [BF16, PP2]),
    "FSDP": (1, FSDP),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_micro_batch_waits_for_the_gpu(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    ranks, overrides = SETTINGS[name]
    config = make_config(folders["qwen2"], *overrides, SMALL_ROWS, ranks=ranks)
    for metrics in pool.run(ranks, actor_jobs.refuse_waits, config, make_samples(12)):
        assert metrics["actor/micro_batches"] > 2


@pytest.mark.parametrize("overrides", [[BF16], FSDP], ids=["Megatron", "FSDP"])
def test_planted_tensor_of_the_host_is_found(overrides: list[str], pool: WorkerPool, folders: dict[str, Path]) -> None:
    config = make_config(folders["qwen2"], *overrides)
    [message] = pool.run(1, actor_jobs.plant_host_tensor, config, make_samples(4))
    assert "Expected all tensors to be on the same device" in message


@pytest.mark.parametrize("overrides", [[], FSDP], ids=["Megatron", "FSDP"])
def test_update_beyond_the_memory_of_the_gpu_is_split(
    overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config, smaller = (
        make_config(folders["qwen2"], *overrides, "trainer.oom=split", f"{ACTOR}.max_token_len={limit}")
        for limit in (512, 128)
    )
    [(more, less)] = pool.run(1, actor_jobs.update_with_memory, config, make_samples(12), smaller)
    assert (more["actor/micro_batches"], less["actor/micro_batches"]) == (1, 2)
    compared: list[str] = ["actor/kl_loss", "actor/grad_norm"]
    close: dict[str, Any] = {key: pytest.approx(more[key], rel=1e-5 if not overrides else 0.02) for key in compared}
    assert {key: less[key] for key in compared} == close
