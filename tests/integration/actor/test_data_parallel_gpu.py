"""Overlapped communication of data-parallel ranks, and checkpoints of their optimizer shards, on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests._support.layouts import OVERLAP
from tests._support.tiny_models import MEGATRON, make_config
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs, save_jobs
from tests.integration.actor.reference import assert_metrics, assert_weights
from tests.integration.actor.test_layouts import BATCHES, reference

pytestmark = pytest.mark.gpu

ON_GPU = ["trainer.device=cuda", f"{MEGATRON}.transformer_impl=local"]


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs; this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize("overrides", [[], OVERLAP], ids=["default", "several buckets, weights too"])
def test_overlapped_training_in_float32_equals_reference(
    overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    needs_gpus(2)
    want_metrics, want_weights, _ = reference(folders["qwen2"])
    config = make_config(folders["qwen2"], *overrides, *ON_GPU, ranks=2)
    metrics, weights = pool.run(2, jobs.train_on_device, config, BATCHES)[0]
    assert_metrics(metrics, want_metrics)
    assert_weights(weights, want_weights)


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_repeats_next_step(ranks: int, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
    needs_gpus(ranks)
    config = make_config(folders["qwen2"], *ON_GPU, ranks=ranks)
    for want, found in pool.run(ranks, save_jobs.repeat_update, config, *BATCHES, tmp_path / "ckpt"):
        for key in ("actor/kl_loss", "actor/grad_norm"):
            assert [step[key] for step in found] == pytest.approx([step[key] for step in want], rel=1e-5), key
