"""Megatron in bfloat16 with a float32 model folder: the optimizer begins with the folder's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests._support.layouts import BF16, EP2, PLAIN_OPTIMIZER, PP2, TP2
from tests._support.tiny_models import ACTOR, make_config, make_folder, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.families import jobs

BATCH = make_samples(9)
LR = 1e-5
"""Small in comparison with the distance of two bfloat16 numbers, so that rounded weights would hardly change."""


def change(after: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
    """Return the changes of all matrices in one vector."""
    matrices = [name for name, tensor in before.items() if tensor.dim() > 1]
    return torch.cat([(after[name].double() - before[name].double()).flatten() for name in matrices])


@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [
        pytest.param("qwen2", 2, [TP2], id="tensor-parallel"),
        pytest.param("qwen2", 1, [PLAIN_OPTIMIZER], id="plain-optimizer"),
        pytest.param("qwen3_moe", 2, [EP2], marks=pytest.mark.slow, id="experts"),
        pytest.param("qwen2", 2, [PP2], marks=pytest.mark.slow, id="pipeline-tied"),
    ],
)
def test_first_update_changes_bfloat16_weights_like_float32_ones(
    kind: str, ranks: int, layout: list[str], pool: WorkerPool, tmp_path: Path
) -> None:
    """In the mean, a rounded weight that began at its float32 value changes as much as the float32 value does."""
    folder = make_folder(tmp_path / "model", kind)
    before, changes = load_file(folder / "model.safetensors"), []
    for number, dtype in enumerate(([BF16], [])):
        config = make_config(folder, *layout, *dtype, f"{ACTOR}.optim.lr={LR}", ranks=ranks)
        _, after = pool.run(ranks, jobs.update_and_save, config, BATCH, tmp_path / str(number))[0]
        start = {name: tensor.to(after[name].dtype) for name, tensor in before.items()}
        changes.append(change(after, start))
    rounded, exact = changes
    assert float(rounded @ exact / (exact @ exact)) == pytest.approx(1, abs=0.2)
