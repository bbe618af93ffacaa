"""An update in plain float64 with transformers and torch's AdamW, one sample at a time, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.tiny_models import read_model
from recipe_gkd.data.samples import Sample

LR, BETAS, MAX_NORM = 0.01, (0.9, 0.95), 1.0


class Update(NamedTuple):
    """Result of an update without weight decay.

    Attributes:
        loss: Mean forward KL divergence.
        grad_norm: Norm of the gradient before clipping.
        step: Change of each weight, by name.
    """

    loss: float
    grad_norm: float
    step: dict[str, Tensor]


def reference_update(folder: Path, samples: Sequence[Sample]) -> Update:
    """Return the result of the first update on a batch."""
    model = read_model(folder, torch.float64)
    names = {name: parameter for name, parameter in model.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in names.items()}
    adam = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0)
    loss = torch.cat([_forward_kl_T(model, sample) for sample in samples]).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    adam.step()
    step = {name: parameter.detach() - before[name] for name, parameter in names.items()}
    return Update(loss.item(), norm.item(), step)


def _forward_kl_T(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Return the divergence at each response token, with one bucket for all ids outside the teacher's top-k."""
    logits = model(torch.as_tensor(sample.token_ids).long()[None]).logits[0]
    first = len(sample.prompt.ids) - 1
    q_TV = logits[first : first + len(sample.response.ids)].softmax(1)
    p_TK = torch.as_tensor(sample.top_k.logps_TK).double().exp()
    q_TK = q_TV.gather(1, torch.as_tensor(sample.top_k.ids_TK).long())
    p_TB, q_TB = (torch.cat([top, 1 - top.sum(1, keepdim=True)], 1) for top in (p_TK, q_TK))
    return (p_TB * (p_TB.log() - q_TB.log())).sum(1)
