"""The same training, written plainly: transformers, torch's AdamW, one sample at a time, float64."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.data.samples import Sample

Objective = Callable[[Sequence[tuple[Sample, Tensor]]], dict[str, Tensor]]
"""Of the samples with a response, each with the float64 logits [T, V] that predict it: `actor/*`, with `actor/loss`."""


def reference_training(
    folder: Path,
    batches: Sequence[list[Sample]],
    objective: Objective | None = None,
    *,
    lr: float = 0.01,
    clip: float = 0.5,
    decay: float = 0.05,
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
        answered = [sample for sample in batch if len(sample.response.ids)]
        losses = (objective or forward_kl)([(sample, predicting(model, sample)) for sample in answered])
        loss = losses["actor/loss"]
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        n_tokens = float(sum(len(sample.response.ids) for sample in answered))
        found = {name: value.item() for name, value in losses.items()}
        metrics.append(found | {"actor/grad_norm": norm.item(), "actor/n_tokens": n_tokens})
    with tempfile.TemporaryDirectory() as path:  # transformers names and cuts a mixture's weights anew when it saves
        model.save_pretrained(path)
        return metrics, load_file(Path(path) / "model.safetensors")


def predicting(model: torch.nn.Module, sample: Sample) -> Tensor:
    """The logits at position p - 1 predict token p."""
    logits = model(torch.as_tensor(sample.token_ids).long()[None]).logits[0]
    first = len(sample.prompt.ids)
    return logits[first - 1 : first - 1 + len(sample.response.ids)]


def forward_kl(samples: Sequence[tuple[Sample, Tensor]]) -> dict[str, Tensor]:
    loss = torch.cat([forward_kl_T(sample, logits) for sample, logits in samples]).mean()
    return {"actor/loss": loss, "actor/kl_loss": loss}


def forward_kl_T(sample: Sample, logits_TV: Tensor) -> Tensor:
    """With one bucket for all ids that are not among the teacher's."""
    p_TK = torch.as_tensor(sample.teacher.logps_TK).double().exp()
    ids_TK = torch.as_tensor(sample.teacher.ids_TK).long()
    q_TK = logits_TV.double().softmax(1).gather(1, ids_TK)
    p_TB = torch.cat([p_TK, 1 - p_TK.sum(1, keepdim=True)], 1)
    q_TB = torch.cat([q_TK, 1 - q_TK.sum(1, keepdim=True)], 1)
    return (p_TB * (p_TB.log() - q_TB.log())).sum(1)
