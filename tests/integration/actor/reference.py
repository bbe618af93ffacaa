"""Reference training in plain float64: transformers, torch's AdamW, one sample at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.data.samples import Sample
from tests._support.tiny_models import without_empty

Objective = Callable[[Sequence[tuple[Sample, Tensor]]], dict[str, Tensor]]
"""Function that returns the ``actor/*`` metrics of a batch, with ``actor/loss``.

Its argument has the samples with a response, each with the float64 logits [T, V] that predict it.
"""


def reference_training(
    folder: Path,
    batches: Sequence[list[Sample]],
    objective: Objective | None = None,
    *,
    lr: float = 0.01,
    clip: float = 0.5,
    decay: float = 0.05,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train a Hugging Face model with one step per batch.

    Args:
        batches: Batch of each step.
        objective: Objective; None for :func:`forward_kl`.
        clip: Maximum gradient norm.
        decay: Weight decay of matrices.

    Returns:
        Metrics of each step, and the weights after the last step under the names of a saved folder.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        experts_implementation="eager",  # the grouped implementation does not support float64
    )
    metrics = train_reference(model, batches, objective or forward_kl, lr=lr, clip=clip, decay=decay)
    with tempfile.TemporaryDirectory() as path:  # saving converts a mixture-of-experts model's weights and their names
        model.save_pretrained(path)
        return metrics, load_file(Path(path) / "model.safetensors")


def train_reference(
    model: torch.nn.Module,
    batches: Sequence[list[Sample]],
    objective: Objective,
    *,
    lr: float = 0.01,
    clip: float = 0.5,
    decay: float = 0.05,
) -> list[dict[str, float]]:
    """Train a model with one step per batch, and return the metrics of each step; see :func:`reference_training`."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    metrics = []
    for batch in batches:
        samples = without_empty(batch)
        losses = objective([(sample, predicting(model, sample)) for sample in samples])
        loss = losses["actor/loss"]
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        n_tokens = float(sum(len(sample.response.ids) for sample in samples))
        found = {name: value.item() for name, value in losses.items()}
        metrics.append(found | {"actor/grad_norm": norm.item(), "actor/n_tokens": n_tokens})
    return metrics


def predicting(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Return the logits that predict the response tokens, [T, V]: those at position p - 1 predict token p."""
    logits = model(torch.as_tensor(sample.token_ids).long()[None]).logits[0]
    first = len(sample.prompt.ids)
    return logits[first - 1 : first - 1 + len(sample.response.ids)]


def forward_kl(samples: Sequence[tuple[Sample, Tensor]]) -> dict[str, Tensor]:
    """Return the mean forward KL divergence over all response tokens."""
    loss = torch.cat([forward_kl_T(sample, logits) for sample, logits in samples]).mean()
    return {"actor/loss": loss, "actor/kl_loss": loss}


def forward_kl_T(sample: Sample, logits_TV: Tensor) -> Tensor:
    """Return the forward KL divergence per token, with one bucket for all ids outside of the teacher's top-k."""
    p_TK = torch.as_tensor(sample.teacher.logps_TK).double().exp()
    ids_TK = torch.as_tensor(sample.teacher.ids_TK).long()
    q_TK = logits_TV.double().softmax(1).gather(1, ids_TK)
    p_TB = torch.cat([p_TK, 1 - p_TK.sum(1, keepdim=True)], 1)
    q_TB = torch.cat([q_TK, 1 - q_TK.sum(1, keepdim=True)], 1)
    return (p_TB * (p_TB.log() - q_TB.log())).sum(1)


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
        assert sum(others) / len(others) < 4e-6, name  # 1e-6 to 2e-6, depending on the CPU
        # A gradient close to zero is mostly rounding error, which Adam scales up. Its steps sum to at most 2e-2.
        assert max(others) < 2e-3 and largest < 2e-2, name
