"""Mixture-of-experts models: training, export and checkpoints on any layout, and rejected settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests._support.layouts import BF16, CP2, EP2, ETP1, OVERLAP, OVERRIDE, PLAIN_OPTIMIZER, PP2, SP, TP2, VPP2
from tests._support.tiny_models import make_config, transformers_logits, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs, save_jobs
from tests.integration.actor.reference import assert_metrics, assert_weights
from tests.integration.actor.test_checkpoint import FIRST, SECOND
from tests.integration.actor.test_layouts import BATCHES, reference

LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "one process": ("qwen3_moe", 1, []),
    "one process, shared expert": ("qwen2_moe", 1, []),
    "expert 2": ("qwen3_moe", 2, [EP2]),
    "expert 2, plain optimizer, mixtral": ("mixtral", 2, [EP2, PLAIN_OPTIMIZER]),
    "tensor 2 of each expert": ("qwen3_moe", 2, [TP2, SP]),
    "tensor 2, all experts on both ranks": ("qwen3_moe", 2, [TP2, SP, ETP1]),
    "tensor 2, half of the experts on each, shared expert": ("qwen2_moe", 2, [TP2, SP, ETP1, EP2]),
    "tensor 2 x expert 2": ("qwen3_moe", 4, [TP2, SP, EP2]),
    "pipeline 2 x expert 2, overlapped": ("qwen3_moe", 4, [PP2, EP2, *OVERLAP]),
    "pipeline 2, interleaved, x expert 2": ("qwen3_moe", 4, [PP2, VPP2, EP2]),
    "context 2 x expert 2": ("qwen3_moe", 2, [CP2, EP2]),
}
SLOW_LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "context 2, shared expert": ("qwen2_moe", 2, [CP2]),
    "context 2 x tensor 2 x expert 2": ("qwen3_moe", 4, [CP2, TP2, SP, EP2]),
    "context 2 x tensor 2 x expert 4": ("qwen3_moe", 4, [CP2, TP2, SP, EP2.replace("=2", "=4"), ETP1]),
}


class TestTraining:
    @pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
    def test_training_on_layout_equals_reference_and_exports_all_experts(
        self, name: str, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        """Compare loaded weights, logits of packed sequences, and metrics and weights of two updates."""
        kind, ranks, overrides = (LAYOUTS | SLOW_LAYOUTS)[name]
        want_metrics, want_weights, want_logits = reference(folders[kind])
        results = pool.run(ranks, jobs.export_and_train, make_config(folders[kind], *overrides, ranks=ranks), BATCHES)

        loaded, training = results[0]
        assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in loaded.items()] == training.meta
        assert not any(before or after.weights for before, after in results[1:]), "only rank 0 may yield weights"
        in_file = load_file(folders[kind] / "model.safetensors")
        assert loaded.keys() == in_file.keys() and sum(".experts.3." in name for name in loaded) >= 9
        assert all(torch.equal(tensor, in_file[name]) for name, tensor in loaded.items())

        last_stages = [result.logits for _, result in results if result.logits is not None]
        assert last_stages
        for logits in last_stages:
            torch.testing.assert_close(logits[: len(want_logits)], want_logits, rtol=0, atol=1e-5)
        for _, result in results:
            assert_metrics(result.metrics, want_metrics)
        assert_weights(training.weights, want_weights)

    def test_training_bfloat16_is_close_to_reference(self, pool: WorkerPool, folders: dict[str, Path]) -> None:
        """The router computes in float32; otherwise rounding would select other experts."""
        want_metrics, _, _ = reference(folders["qwen3_moe"])
        config = make_config(folders["qwen3_moe"], TP2, SP, EP2, ETP1, BF16, ranks=2)
        result = pool.run(2, jobs.train, config, BATCHES)[0]
        assert {dtype for _, _, dtype in result.meta} == {"bfloat16"}
        assert {str(t.dtype) for t in result.weights.values()} == {"torch.bfloat16"}
        for one, other in zip(result.metrics, want_metrics, strict=True):
            assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=2e-2)
            assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=5e-2)

    def test_training_with_aux_loss_override_changes_gradient_only(
        self, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        """The auxiliary loss that balances the experts is off by default."""
        want_metrics, _, _ = reference(folders["qwen3_moe"])
        config = make_config(folders["qwen3_moe"], EP2, f"{OVERRIDE}.moe_aux_loss_coeff=0.5", ranks=2)
        metrics = pool.run(2, jobs.train, config, BATCHES)[0].metrics
        assert metrics[0]["actor/kl_loss"] == pytest.approx(want_metrics[0]["actor/kl_loss"], rel=1e-5)
        assert metrics[0]["actor/grad_norm"] != pytest.approx(want_metrics[0]["actor/grad_norm"], rel=1e-2)


class TestCheckpoint:
    @pytest.mark.parametrize(
        ("saved", "then"),
        [
            pytest.param([EP2], [([EP2], 2), ([], 1), ([TP2, SP, EP2, ETP1], 2)], id="expert 2"),
            pytest.param([PP2], [([EP2], 2)], id="pipeline 2", marks=pytest.mark.slow),
        ],
    )
    def test_resume_in_any_layout_repeats_next_step(
        self, saved: list[str], then: list[tuple[list[str], int]],
        pool: WorkerPool, folders: dict[str, Path], tmp_path: Path,
    ) -> None:  # fmt: skip
        path = tmp_path / "ckpt"
        config = make_config(folders["qwen3_moe"], *saved, ranks=2)
        want_metrics, want_weights = pool.run(2, save_jobs.train_and_save, config, FIRST, SECOND, path)[0]
        for resumed, ranks in then:
            config = make_config(folders["qwen3_moe"], *resumed, ranks=ranks)
            step, metrics, weights = pool.run(ranks, save_jobs.resume_and_train, config, path, SECOND)[0]
            exactly = resumed == saved
            assert step == 1
            for key in ("actor/kl_loss", "actor/grad_norm"):
                assert metrics[key] == pytest.approx(want_metrics[key], rel=0 if exactly else 1e-5), (key, resumed)
            for name, tensor in weights.items():
                assert (tensor - want_weights[name]).abs().max() <= (0 if exactly else 1e-5), (name, resumed)

    def test_save_hf_loaded_by_transformers_has_same_logits(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = make_config(folders["qwen3_moe"], EP2, ranks=2)
        logits = next(x for x in pool.run(2, save_jobs.save_hf, config, FIRST, tmp_path / "saved") if x is not None)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        want = transformers_logits(model, without_empty(FIRST))
        torch.testing.assert_close(logits[: len(want)], want, rtol=0, atol=1e-5)
