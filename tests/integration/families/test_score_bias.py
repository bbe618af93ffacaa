"""Corrections of the routers' scores: they stay float32 in a bfloat16 actor, its exports and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests._support.families import BY_TYPE, make_family_folder
from tests._support.layouts import BF16
from tests._support.tiny_models import ACTOR, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import save_jobs
from tests.integration.families import jobs

BATCH = make_samples(9)
STRATEGIES = {"megatron": [BF16], "fsdp": [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=bfloat16"]}
OFFSET = 8.0
"""Common offset of all corrections, as in released models. It chooses no other experts, but bfloat16 has steps of 1/16
or 1/32 there."""


def make_pair(base: Path, kind: str) -> tuple[Path, Path]:
    """Write two folders of a model, with corrections near 0 and near the offset. Both sums are exact in float32."""
    folders = make_family_folder(base / "near", BY_TYPE[kind]), make_family_folder(base / "far", BY_TYPE[kind])
    for folder, offset in zip(folders, (0.0, OFFSET), strict=True):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in corrections(tensors).items():
            tensors[name] = (tensor * 1024).round() / 1024 + offset
        save_file(tensors, file, metadata={"format": "pt"})
    return folders


def corrections(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the corrections of a folder or an export, which must be float32."""
    found = {name: tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")}
    assert found and all(tensor.dtype == torch.float32 for tensor in found.values())
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("megatron", "minimax_m2"),
        pytest.param("megatron", "ernie4_5_moe", marks=pytest.mark.slow),
        ("fsdp", "glm4_moe"),
        ("fsdp", "ernie4_5_moe"),
    ],
)
def test_correction_is_not_rounded(strategy: str, kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    """An offset that chooses no other experts does not change the update, and is exported exactly."""
    metrics = []
    for folder in make_pair(tmp_path, kind):
        config, saved = make_config(folder, *STRATEGIES[strategy]), folder.with_name(f"{folder.name}_saved")
        found, weights = pool.run(1, jobs.update_and_save, config, BATCH, saved)[0]
        metrics.append([found[key] for key in ("actor/kl_loss", "actor/grad_norm")])
        others = weights.keys() - corrections(weights).keys()
        assert {weights[name].dtype for name in others} == {torch.bfloat16}
        assert_equal(corrections(weights), corrections(load_file(folder / "model.safetensors")))
        assert_equal(corrections(load_file(saved / "model.safetensors")), corrections(weights))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


def test_loaded_correction_is_exported(pool: WorkerPool, tmp_path: Path) -> None:
    """A checkpoint of Megatron has the corrections. Those of the folder may be others."""
    near, far = make_pair(tmp_path, "minimax_m2")
    checkpoint = tmp_path / "checkpoint"
    pool.run(1, save_jobs.train_and_save, make_config(far, BF16), BATCH, BATCH, checkpoint)
    _, _, weights = pool.run(1, save_jobs.resume_and_train, make_config(near, BF16), checkpoint, BATCH)[0]
    assert_equal(corrections(weights), corrections(load_file(far / "model.safetensors")))


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_export_in_another_data_type_keeps_the_correction(strategy: str, pool: WorkerPool, tmp_path: Path) -> None:
    _, folder = make_pair(tmp_path, "minimax_m2")
    config = make_config(folder, f"{ACTOR}.strategy={strategy}", f"{ACTOR}.fsdp_config.dtype=float32")
    step, out = tmp_path / "global_step_1", tmp_path / "out"
    pool.run(1, save_jobs.train_and_save, config, BATCH, BATCH, step / "actor")
    pool.run(1, jobs.export_checkpoint, config, step, out, "bfloat16")
    weights = load_file(out / "model.safetensors")
    assert_equal(corrections(weights), corrections(load_file(folder / "model.safetensors")))
    others = weights.keys() - corrections(weights).keys()
    assert {weights[name].dtype for name in others} == {torch.bfloat16}
