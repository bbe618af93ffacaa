"""Training on one GPU with the layers of torch and of Transformer Engine, compared with the reference on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests._support.layouts import BF16
from tests._support.tiny_models import MEGATRON, make_config
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.reference import assert_metrics, assert_weights
from tests.integration.actor.test_layouts import BATCHES, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "qwen3_moe"])
class TestTrainingOnGpu:
    def test_local_layers_in_float32_equal_reference(
        self, kind: str, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        want_metrics, want_weights, _ = reference(folders[kind])
        config = make_config(folders[kind], "trainer.device=cuda", f"{MEGATRON}.transformer_impl=local")
        [(metrics, weights)] = pool.run(1, jobs.train_on_device, config, BATCHES)
        assert_metrics(metrics, want_metrics)
        assert_weights(weights, want_weights)

    @pytest.mark.parametrize("impl", ["local", "transformer_engine"])
    def test_layers_in_bfloat16_are_close_to_reference(
        self, impl: str, kind: str, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        """The attention is `varlen_attn`, or on Hopper and Blackwell that of Transformer Engine."""
        if impl == "transformer_engine" and importlib.util.find_spec(impl) is None:
            pytest.skip("needs Transformer Engine")
        want_metrics, _, _ = reference(folders[kind])
        config = make_config(folders[kind], BF16, "trainer.device=cuda", f"{MEGATRON}.transformer_impl={impl}")
        [(metrics, _)] = pool.run(1, jobs.train_on_device, config, BATCHES)
        for one, other in zip(metrics, want_metrics, strict=True):
            assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=1e-2)
            assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=3e-2)
