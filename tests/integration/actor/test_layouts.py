"""Equality of the training on any parallel layout with a reference training."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from tests._support.layouts import (
    BF16,
    BY_SAMPLES,
    CP2,
    FLOAT32_HEAD,
    OVERLAP,
    PLAIN_OPTIMIZER,
    PP2,
    RECOMPUTE,
    SP,
    TP2,
    VPP2,
)
from tests._support.tiny_models import (
    ACTOR,
    VOCAB,
    make_config,
    make_folder,
    make_samples,
    transformers_logits,
    with_ids_below,
    with_turns,
    without_empty,
)
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training

BATCHES = [make_samples(9), with_turns(make_samples(9, seed=1))]
PADDED_VOCAB = 128
N_TOKENS = 80

LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "one process": ("qwen2", 1, []),
    "one process, plain optimizer": ("qwen2", 1, [PLAIN_OPTIMIZER]),
    "micro-batches of 1": ("qwen2", 1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=1"]),
    "micro-batches of 2": ("qwen2", 1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=2"]),
    "micro-batches of 7": ("qwen2", 1, [BY_SAMPLES, f"{ACTOR}.micro_batch_size=7"]),
    "recomputed activations": ("qwen2", 1, RECOMPUTE),
    "untied": ("qwen2_untied", 1, []),
    "qwen3": ("qwen3", 1, []),
    "tensor 2": ("qwen2", 2, [TP2]),
    "tensor 2, sequence parallel": ("qwen2", 2, [TP2, SP]),
    "tensor 2, sequence parallel, qwen3": ("qwen3", 2, [TP2, SP]),
    "tensor 2, llama": ("llama", 2, [TP2]),
    "pipeline 2": ("qwen2", 2, [PP2]),
    "pipeline 2, untied": ("qwen2_untied", 2, [PP2]),
    "pipeline 2, interleaved": ("qwen2", 2, [PP2, VPP2]),
    "data 2": ("qwen2", 2, []),
    "data 2, plain optimizer, by samples": ("qwen2", 2, [PLAIN_OPTIMIZER, BY_SAMPLES, f"{ACTOR}.micro_batch_size=2"]),
    "tensor 2 x pipeline 2, sequence parallel": ("qwen2", 4, [TP2, PP2, SP]),
    "tensor 2 x data 2, overlapped": ("qwen2_untied", 4, [TP2, *OVERLAP]),
    "context 2": ("qwen2", 2, [CP2]),
    "context 2 x tensor 2, sequence parallel": ("qwen2", 4, [CP2, TP2, SP]),
}  # fmt: skip
SLOW_LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "pipeline 2 x data 2, interleaved, overlapped": ("qwen2", 4, [PP2, VPP2, *OVERLAP]),
    "context 2, recomputed activations": ("qwen3", 2, [CP2, *RECOMPUTE]),
    "context 2, plain optimizer, by samples": (
        "llama", 2, [CP2, PLAIN_OPTIMIZER, BY_SAMPLES, f"{ACTOR}.micro_batch_size=1"]
    ),
    "context 2 x tensor 2": ("qwen2_untied", 4, [CP2, TP2]),
    "context 2 x pipeline 2": ("qwen2", 4, [CP2, PP2]),
    "context 2 x pipeline 2, interleaved": ("qwen2_untied", 4, [CP2, PP2, VPP2]),
    "context 2 x data 2": ("qwen2", 4, [CP2]),
    "context 4": ("qwen2", 4, [CP2.replace("=2", "=4")]),
}  # fmt: skip


@cache
def reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor], Tensor]:
    """Return metrics and weights of the reference training on :data:`BATCHES`, and the logits before it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    logits = transformers_logits(model, without_empty(BATCHES[0]))
    return *reference_training(folder, BATCHES), logits


class TestTraining:
    @pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
    def test_training_on_layout_equals_reference(self, name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
        kind, ranks, overrides = (LAYOUTS | SLOW_LAYOUTS)[name]
        want_metrics, want_weights, want_logits = reference(folders[kind])
        results = pool.run(ranks, jobs.train, make_config(folders[kind], *overrides, ranks=ranks), BATCHES)

        last_stages = [result.logits for result in results if result.logits is not None]
        assert last_stages
        for logits in last_stages:
            torch.testing.assert_close(logits[: len(want_logits)], want_logits, rtol=0, atol=1e-5)
        for result in results:
            assert_metrics(result.metrics, want_metrics)
        weights, meta = results[0].weights, results[0].meta
        assert all(not result.weights for result in results[1:]), "only rank 0 may yield weights"
        assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()] == meta
        assert_weights(weights, want_weights)

    @pytest.mark.parametrize(
        "overrides",
        [
            pytest.param([TP2, SP], marks=pytest.mark.slow),
            [TP2, SP, FLOAT32_HEAD],
            pytest.param([TP2, FLOAT32_HEAD, "gkd.fuse_lm_head=true"], marks=pytest.mark.slow),
            pytest.param([CP2], marks=pytest.mark.slow),
        ],
    )
    def test_training_bfloat16_is_close_to_reference(
        self, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        config = make_config(folders["qwen2"], *overrides, BF16, ranks=2)
        want_metrics, _, _ = reference(folders["qwen2"])
        result = pool.run(2, jobs.train, config, BATCHES)[0]
        assert {dtype for _, _, dtype in result.meta} == {"bfloat16"}
        assert {str(t.dtype) for t in result.weights.values()} == {"torch.bfloat16"}
        for one, other in zip(result.metrics, want_metrics, strict=True):
            assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=1e-2)
            assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=3e-2)

    @pytest.mark.parametrize(
        ("ranks", "overrides"),
        [
            pytest.param(2, [], marks=pytest.mark.slow),
            (4, [TP2, SP, *OVERLAP]),
            pytest.param(4, [CP2, TP2, SP], marks=pytest.mark.slow),
            (2, [CP2]),
        ],
    )
    def test_update_with_idle_ranks_or_empty_batch_succeeds(
        self, ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        """One sample for two data-parallel or context ranks, responses without tokens, no sample, a full batch."""
        one = without_empty(BATCHES[0])[:1]
        empty = [sample for seed in range(9) for sample in make_samples(9, seed=seed) if not len(sample.response.ids)]
        want_metrics, want_weights = reference_training(folders["qwen2"], [one, BATCHES[1]])
        config = make_config(folders["qwen2"], *overrides, ranks=ranks)
        results = pool.run(ranks, jobs.train, config, [one, empty, [], BATCHES[1]])
        for result in results:
            assert_metrics([result.metrics[0], result.metrics[3]], want_metrics)
            assert [m["actor/n_tokens"] for m in result.metrics[1:3]] == [0, 0]
            assert not any("actor/kl_loss" in m for m in result.metrics[1:3]), "there is no mean over zero tokens"
            assert result.metrics == results[0].metrics, "all ranks report the same metrics"
        assert_weights(results[0].weights, want_weights)


class TestLogits:
    @pytest.mark.parametrize(("overrides", "expected"), [([], torch.bfloat16), ([FLOAT32_HEAD], torch.float32)])
    def test_logits_have_only_loss_rows_in_dtype_of_head(
        self, overrides: list[str], expected: torch.dtype, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        config = make_config(folders["qwen2"], TP2, SP, BF16, *overrides, ranks=2)
        n_tokens = sum(len(sample.response.ids) for sample in BATCHES[0])
        for rows, columns, dtype in pool.run(2, jobs.record_loss_input, config, BATCHES[0]):
            assert (rows, columns, dtype) == (n_tokens, PADDED_VOCAB // 2, expected)

    def test_logits_with_llama3_rope_equal_transformers(self, pool: WorkerPool, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "llama3", "llama3")
        ids = np.random.default_rng(0).integers(0, VOCAB, 240)  # long enough for an effect of the scaled frequencies
        sample = make_sample(0, ids[:220], ids[220:], np.full((20, 1), -1.0), np.zeros((20, 1)))
        logits = pool.run(1, jobs.compute_logits, make_config(folder), [sample])[0]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        want = transformers_logits(model, [sample])
        torch.testing.assert_close(logits[: len(want)], want, rtol=0, atol=1e-5)

        values = json.loads((folder / "config.json").read_text())
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": values["rope_parameters"]["rope_theta"]}
        (folder / "config.json").write_text(json.dumps(values))
        unscaled = transformers_logits(transformers.AutoModelForCausalLM.from_pretrained(folder), [sample])
        assert (unscaled - want).abs().max() > 1e-2


class TestPaddingRows:
    @pytest.mark.parametrize(
        ("kind", "overrides"),
        [
            pytest.param("qwen2", [], id="tied, data 2"),
            pytest.param("qwen2", [TP2, BF16], id="tied, tensor 2, bfloat16"),
            pytest.param("qwen2", [PP2, BF16, PLAIN_OPTIMIZER], id="tied, pipeline 2, bfloat16, plain optimizer"),
            pytest.param("qwen2_untied", [BF16], id="untied, data 2, bfloat16"),
            pytest.param("qwen2_untied", [TP2, PLAIN_OPTIMIZER], id="untied, tensor 2, plain optimizer"),
        ],
    )
    def test_padding_rows_after_updates_are_bitwise_unchanged(
        self, kind: str, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        batches = [[with_ids_below(N_TOKENS, sample) for sample in batch] for batch in [*BATCHES, BATCHES[0]]]
        config = make_config(folders[kind], *overrides, f"{ACTOR}.optim.weight_decay=10", ranks=2)
        results = pool.run(2, jobs.train_with_padding_rows, config, batches, N_TOKENS)
        before, after, _ = results[0]
        assert all(unchanged for _, _, unchanged in results)
        names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (kind == "qwen2_untied")
        for name in names:
            assert before[name][N_TOKENS:].abs().min() > 0
            assert torch.equal(before[name][N_TOKENS:], after[name][N_TOKENS:])
            changed = (before[name][:N_TOKENS] != after[name][:N_TOKENS]).any(1)
            assert changed.all(), "weight decay changes the rows of all tokens"
