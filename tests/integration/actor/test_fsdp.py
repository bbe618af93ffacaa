"""The FSDP backend: equality with a reference training and with Megatron, on any number of ranks."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests._support.tiny_models import ACTOR, make_config, make_samples, with_ids_below, with_turns
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32"]
BATCHES = [make_samples(9, seed=0), *(with_turns(make_samples(9, seed=seed)) for seed in range(1, 5))]
SETTINGS: dict[str, tuple[str, int, list[str]]] = {
    "one process": ("qwen2", 1, []),
    "untied, fused head, by samples": (
        "qwen2_untied", 1, ["gkd.fuse_lm_head=true", f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.micro_batch_size=2"]
    ),
    "two shards": ("qwen2", 2, []),
    "two shards, fused head, checkpointed": (
        "qwen2", 2, ["gkd.fuse_lm_head=true", f"{ACTOR}.fsdp_config.gradient_checkpointing=true"]
    ),
    "two copies": ("llama", 2, [f"{ACTOR}.fsdp_config.fsdp_size=1"]),
    "whole model as one unit, kept": (
        "qwen3", 2, [f"{ACTOR}.fsdp_config.wrap_policy=[]", f"{ACTOR}.fsdp_config.reshard_after_forward=false"]
    ),
}  # fmt: skip


@cache
def reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return metrics and weights of a plain training of transformers on :data:`BATCHES`."""
    return reference_training(folder, BATCHES)


@pytest.mark.parametrize("name", SETTINGS)
def test_training_equals_reference(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    kind, ranks, overrides = SETTINGS[name]
    want_metrics, want_weights = reference(folders[kind])
    results = pool.run(ranks, jobs.train_any, make_config(folders[kind], *FSDP, *overrides, ranks=ranks), BATCHES)
    for result in results:
        assert_metrics(result.metrics, want_metrics, rel=1e-4)
    weights, meta = results[0].weights, results[0].meta
    assert not any(result.weights for result in results[1:]), "only rank 0 may yield weights"
    assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()] == meta
    assert_weights(weights, want_weights)


def test_copies_of_the_model_add_their_gradients_once_per_update(pool: WorkerPool, folders: dict[str, Path]) -> None:
    found = []
    for max_token_len in (4096, 16):
        overrides = [*FSDP, f"{ACTOR}.fsdp_config.fsdp_size=1", f"{ACTOR}.max_token_len={max_token_len}"]
        config = make_config(folders["llama"], *overrides, ranks=2)
        found += pool.run(2, jobs.count_all_reduces, config, BATCHES[0])
    n_micro_batches, n_calls = zip(*found, strict=True)
    assert n_micro_batches[0] == 1 < n_micro_batches[2]
    assert len(set(n_calls)) == 1 and n_calls[0] > 0


@pytest.mark.parametrize("overrides", [[], ["gkd.fuse_lm_head=true", "actor_rollout_ref.model.head_dtype=float32"]])
def test_training_bfloat16_is_close_to_reference(
    overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    want_metrics, _ = reference(folders["qwen2"])
    bfloat16 = f"{ACTOR}.fsdp_config.dtype=bfloat16"
    config = make_config(folders["qwen2"], *FSDP, bfloat16, *overrides, ranks=2)
    result = pool.run(2, jobs.train_any, config, BATCHES[:2])[0]
    assert {dtype for _, _, dtype in result.meta} == {"bfloat16"}
    for one, other in zip(result.metrics, want_metrics[:2], strict=True):
        assert one["actor/kl_loss"] == pytest.approx(other["actor/kl_loss"], rel=1e-2)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=3e-2)


def test_update_with_idle_rank_or_empty_batch_succeeds(pool: WorkerPool, folders: dict[str, Path]) -> None:
    """One sample for two ranks, no sample, a full batch."""
    batches = [make_samples(9)[:1], [], make_samples(9)]
    config = make_config(folders["qwen2"], *FSDP, ranks=2)
    whole = pool.run(1, jobs.train_any, make_config(folders["qwen2"], *FSDP), batches)[0]
    shared = pool.run(2, jobs.train_any, config, batches)[0]
    assert shared.metrics[1]["actor/grad_norm"] == 0
    for one, other in zip(shared.metrics, whole.metrics, strict=True):
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)
    assert_weights(shared.weights, whole.weights)


def test_padding_rows_after_updates_are_bitwise_unchanged(pool: WorkerPool, folders: dict[str, Path]) -> None:
    n_token_ids = 61
    batches = [[with_ids_below(n_token_ids, sample) for sample in batch] for batch in BATCHES[:2]]
    config = make_config(folders["qwen2_untied"], *FSDP, f"{ACTOR}.optim.weight_decay=0.5", ranks=2)
    before, after = pool.run(2, jobs.weights_around_updates, config, batches, n_token_ids)[0]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(before[name][n_token_ids:], after[name][n_token_ids:])
        assert not torch.equal(before[name][:n_token_ids], after[name][:n_token_ids])


def test_padding_token_is_trained_like_any_other(pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
    """Transformers gives the embedding of the padding token no gradient, but a student can sample this token."""
    folder = shutil.copytree(folders["qwen2"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 5}))
    want_metrics, _ = reference(folders["qwen2"])
    got = pool.run(1, jobs.train_any, make_config(folder, *FSDP), BATCHES[:1])[0]
    assert_metrics(got.metrics, want_metrics[:1])
