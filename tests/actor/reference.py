"""The same training, written plainly: transformers, torch's AdamW, one sample at a time, float64."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.samples import Sample
from tests.actor.tiny import VOCAB
from tests.losses.dense import dense_forward_kl


def reference_training(
    folder: Path, batches: Sequence[list[Sample]], *, lr: float = 0.01, clip: float = 0.5, decay: float = 0.05
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Metrics of each step, and the weights after the last, under the names of a saved folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        experts_implementation="eager",  # the grouped one knows no float64
    )
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    metrics = []
    for batch in batches:
        n_tokens = sum(len(sample.answer.ids) for sample in batch)
        losses = [sample_loss(model, sample) for sample in batch if len(sample.answer.ids)]
        loss = torch.stack(losses).sum() / n_tokens
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        metrics.append({"actor/kl_loss": loss.item(), "actor/grad_norm": norm.item(), "actor/n_tokens": n_tokens})
    with tempfile.TemporaryDirectory() as path:  # transformers names and cuts a mixture's weights anew when it saves
        model.save_pretrained(path)
        return metrics, load_file(Path(path) / "model.safetensors")


def sample_loss(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Sum over the response: the logits at position p - 1 predict token p."""
    logits = model(torch.as_tensor(sample.token_ids).long()[None]).logits[0]
    first = len(sample.prompt.ids)
    predicting = logits[first - 1 : first - 1 + len(sample.answer.ids)]
    teacher = sample.teacher
    ids = torch.as_tensor(teacher.ids_TK).long()
    return dense_forward_kl(predicting, torch.as_tensor(teacher.logps_TK), ids, VOCAB).sum()
