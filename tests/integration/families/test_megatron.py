"""Training of each family with Megatron on several layouts: equality with transformers, export, resume."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests._support.families import BY_TYPE, make_family_folder
from tests._support.layouts import CP2, EP2, ETP1, OVERRIDE, PP2, RECOMPUTE, SP, TP2
from tests._support.tiny_models import (
    ACTOR,
    VOCAB,
    make_config,
    make_samples,
    transformers_logits,
    with_turns,
    without_empty,
)
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs, save_jobs
from tests.integration.actor.lora_reference import ADAPTERS, peft_training
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training
from tests.integration.families import jobs as family_jobs

LR = f"{ACTOR}.optim.lr={1e-3}"
BATCHES = [make_samples(9, seed=0), with_turns(make_samples(9, seed=1)), make_samples(9, seed=2)]
UNEQUAL_PP2 = [PP2, f"+{OVERRIDE}.num_layers_in_last_pipeline_stage=1"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tensor 2, sequence parallel": (2, [TP2, SP]),
    "one process, recomputed": (1, RECOMPUTE),
    "pipeline 2": (2, UNEQUAL_PP2),
    "context 2": (2, [CP2]),
    "data 2": (2, []),
    "expert 2": (2, [EP2]),
    "tensor 2 x expert 2 x pipeline 2": (4, [TP2, SP, EP2, ETP1, *UNEQUAL_PP2]),
}
DEFAULT_KINDS = {
    "gemma3_text", "phi3", "olmo3", "gpt_oss", "glm4_moe", "deepseek_v3", "ernie4_5_moe", "minimax_m2",
}  # fmt: skip
"""Families that are tested by default. Each has parts that the others lack, and all others are made of these parts."""
KINDS = [row.model_type for row in BY_TYPE.values() if not row.megatron]
WITH_EXPERTS = {kind for kind in KINDS if any("num_experts" in name for name in BY_TYPE[kind].config)}

WHOLE_EXPERTS = {"gpt_oss"}
"""Families whose experts tensor parallelism cannot divide."""


def overrides_of(kind: str, overrides: list[str]) -> list[str]:
    """Return the overrides of a layout for a family."""
    return [*overrides, ETP1] if kind in WHOLE_EXPERTS and TP2 in overrides else overrides


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of tiny models, by ``model_type``."""
    base = tmp_path_factory.mktemp("families")
    return {kind: make_family_folder(base / kind, BY_TYPE[kind]) for kind in KINDS}


@cache
def reference(folder: Path) -> tuple[list[dict[str, float]], dict[str, Tensor], Tensor]:
    """Return metrics and weights of the reference training on :data:`BATCHES`, and the logits before it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logits = transformers_logits(model, without_empty(BATCHES[0]))
    return *reference_training(folder, BATCHES, lr=1e-3), logits


def cases() -> list[object]:
    """Return each family with the layouts that it has; the first layout of :data:`DEFAULT_KINDS` runs by default."""
    return [
        pytest.param(kind, name, marks=() if is_default else pytest.mark.slow)
        for kind in KINDS
        for index, (name, (_, overrides)) in enumerate(LAYOUTS.items())
        if EP2 not in overrides or kind in WITH_EXPERTS
        for is_default in [index == 0 and kind in DEFAULT_KINDS]
    ]


@pytest.mark.parametrize(("kind", "layout"), cases())
def test_training_on_layout_equals_transformers_and_exports_the_folder(
    kind: str, layout: str, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    """Compare loaded weights, logits of packed sequences, and metrics and weights of three updates."""
    ranks, overrides = LAYOUTS[layout]
    config = make_config(folders[kind], LR, *overrides_of(kind, overrides), ranks=ranks)
    want_metrics, want_weights, want_logits = reference(folders[kind])
    results = pool.run(ranks, jobs.export_and_train, config, BATCHES)

    loaded, training = results[0]
    in_file = load_file(folders[kind] / "model.safetensors")
    assert loaded.keys() == in_file.keys() and all(torch.equal(loaded[name], in_file[name]) for name in in_file)
    assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in loaded.items()] == training.meta
    last_stages = [result.logits for _, result in results if result.logits is not None]
    assert last_stages
    for logits in last_stages:
        torch.testing.assert_close(logits[: len(want_logits)], want_logits[:, :VOCAB], rtol=1e-4, atol=1e-4)
    for _, result in results:
        assert_metrics(result.metrics, want_metrics, rel=5e-4)
    assert_weights(training.weights, want_weights)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("gemma3_text", "deepseek_v3") else pytest.mark.slow) for kind in KINDS],
)
def test_saved_folder_loads_and_checkpoint_resumes_on_another_layout(
    kind: str, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config, resumed = (
        make_config(folders[kind], LR, *overrides_of(kind, overrides), ranks=2)
        for overrides in ([TP2, SP], UNEQUAL_PP2)
    )
    paths = tmp_path / "checkpoint", tmp_path / "saved"
    metrics, weights = pool.run(2, save_jobs.train_and_save, config, BATCHES[0], BATCHES[1], *paths)[0]
    saved = load_file(paths[1] / "model.safetensors")
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(paths[1], output_loading_info=True)
    assert not any(loading.values()), loading
    step, again, after = pool.run(2, save_jobs.resume_and_train, resumed, paths[0], BATCHES[1])[0]
    assert step == 1 and again["actor/kl_loss"] == pytest.approx(metrics["actor/kl_loss"], rel=1e-5)
    assert_weights(after, {name: tensor.double() for name, tensor in weights.items()})


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "deepseek_v3" else pytest.mark.slow)
        for kind in KINDS
        if not BY_TYPE[kind].megatron_lora
    ],
)
def test_update_of_adapters_equals_peft(kind: str, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
    config = make_config(folders[kind], LR, *overrides_of(kind, [TP2, SP]), *ADAPTERS, ranks=2)
    metrics, weights = pool.run(2, family_jobs.update_and_save, config, BATCHES[0], tmp_path / "saved")[0]
    want_metrics, want_weights = peft_training(folders[kind], None, 1, 1e-3)
    assert_metrics([metrics], want_metrics, rel=1e-4)
    assert_weights(weights, want_weights)
    stored = load_file(folders[kind] / "model.safetensors")
    moved = {name for name, tensor in weights.items() if not torch.equal(tensor, stored[name])}
    assert moved == {name for name, tensor in stored.items() if not torch.equal(want_weights[name], tensor.double())}
    assert moved
