"""Context parallelism on GPUs, with NCCL: the local attention, and Transformer Engine's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests._support.layouts import BF16, CP2, TP2
from tests._support.tiny_models import ACTOR, make_config
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.reference import assert_metrics, assert_weights
from tests.integration.actor.test_layouts import BATCHES, reference

IMPL = f"{ACTOR}.megatron.transformer_impl"

pytestmark = pytest.mark.gpu


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs; this machine has {torch.cuda.device_count()}")


class TestTrainingOnGpus:
    @pytest.mark.parametrize(("ranks", "overrides"), [(2, [CP2]), (4, [CP2, TP2])], ids=["context", "context x tensor"])
    def test_local_attention_in_float32_equals_reference(
        self, ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        needs_gpus(ranks)
        want_metrics, want_weights, _ = reference(folders["qwen2"])
        config = make_config(folders["qwen2"], *overrides, "trainer.device=cuda", f"{IMPL}=local", ranks=ranks)
        metrics, weights = pool.run(ranks, jobs.train_on_device, config, BATCHES)[0]
        assert_metrics(metrics, want_metrics)
        assert_weights(weights, want_weights)

    @pytest.mark.parametrize("impl", ["local", "transformer_engine"])
    def test_training_bfloat16_is_close_to_reference(
        self, impl: str, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        """With Transformer Engine the ranks exchange keys and values, in its layout of packed sequences."""
        needs_gpus(2)
        if impl == "transformer_engine" and importlib.util.find_spec(impl) is None:
            pytest.skip("needs Transformer Engine")
        want_metrics, _, _ = reference(folders["qwen2"])
        config = make_config(folders["qwen2"], CP2, BF16, "trainer.device=cuda", f"{IMPL}={impl}", ranks=2)
        metrics, _ = pool.run(2, jobs.train_on_device, config, BATCHES)[0]
        for one, other in zip(metrics, want_metrics, strict=True):
            assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=1e-2)
            assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=3e-2)
