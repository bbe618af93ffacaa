"""Reference training of Hugging Face folders in plain float64, and comparisons with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.reference import Objective, forward_kl, train_reference
from recipe_gkd.data.samples import Sample


def reference_training(
    folder: Path,
    batches: Sequence[list[Sample]],
    objective: Objective = forward_kl,
    *,
    lr: float = 0.01,
    clip: float = 0.5,
    decay: float = 0.05,
    prepare: Callable[[Any], None] | None = None,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train a Hugging Face model with one step per batch.

    Args:
        batches: Batch of each step.
        objective: Objective of each batch.
        clip: Maximum gradient norm.
        decay: Weight decay of matrices, except joined biases.
        prepare: Changes the model before the training.

    Returns:
        Metrics of each step, and the weights after the last step under the names of a saved folder.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",  # the only one that supports all options of attention layers
        experts_implementation="eager",  # the grouped implementation does not support float64
    )
    if prepare is not None:
        prepare(model)
    metrics = train_reference(model, batches, objective, lr=lr, clip=clip, decay=decay)
    with tempfile.TemporaryDirectory() as path:  # saving converts a mixture-of-experts model's weights and their names
        model.save_pretrained(path)
        return metrics, load_file(Path(path) / "model.safetensors")


def assert_metrics(got: list[dict[str, float]], want: list[dict[str, float]], rel: float = 2e-5) -> None:
    """Check the metrics of each step that the reference has."""
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=rel), (step, key, one[key], value)


def assert_weights(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Check that weights are equal up to the rounding errors of a float32 training."""
    for name, tensor in got.items():
        if name.endswith("k_proj.bias"):
            continue  # attention does not depend on it: its gradient is rounding noise, and Adam keeps the sign
        largest, *others = (tensor.double() - want[name]).abs().flatten().sort(descending=True).values.tolist()
        others = others or [largest]
        assert sum(others) / len(others) < 4e-6, name  # 1e-6 to 2e-6, depending on the CPU
        # A gradient close to zero is mostly rounding error, which Adam scales up. Its steps sum to at most 2e-2.
        assert max(others) < 2e-3 and largest < 2e-2, name
