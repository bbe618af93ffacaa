"""References for the checks and the tests: statistics of dense logits, logits of transformers, plain training.

Shape suffixes: T positions, V vocabulary, K support ids, B = K + 1 buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.tiny_models import read_model
from recipe_gkd.data.samples import Sample
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats

LR, BETAS, MAX_NORM = 0.01, (0.9, 0.95), 1.0

Objective = Callable[[Sequence[tuple[Sample, Tensor]]], dict[str, Tensor]]
"""Function that returns the ``actor/*`` metrics of a batch, with ``actor/loss``.

Its argument has the samples with a response, each with the logits [T, V] that predict it.
"""


def dense_log_stats(logits_TV: Tensor, query: LogitsQuery) -> StudentLogStats:
    """Return the statistics of float64 logits with PyTorch's operations and gradients. Log masses are normalized."""
    sampled_logp_T, entropy_T = dense_sampled_and_entropy(logits_TV, query.sampled_T, query.vocab_size)
    log_q_TV = (logits_TV[:, : query.vocab_size] / query.temperature).log_softmax(1)
    ids_TK = query.ids_TK.where(query.valid_TK, 0)
    in_support_TV = torch.zeros_like(log_q_TV).scatter_add(1, ids_TK, query.valid_TK.to(log_q_TV.dtype)) > 0
    tail_T1 = log_q_TV.masked_fill(in_support_TV, -torch.inf).logsumexp(1, keepdim=True)
    support_TK = log_q_TV.gather(1, ids_TK).masked_fill(~query.valid_TK, -torch.inf)
    log_mass_TB = torch.cat([support_TK, tail_T1], dim=1)
    return StudentLogStats(log_mass_TB=log_mass_TB, sampled_logp_T=sampled_logp_T, entropy_T=entropy_T)


def dense_sampled_and_entropy(logits_TV: Tensor, sampled_T: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the sampled ids' log-probabilities and the entropy of the whole distribution at temperature 1, float64."""
    log_q_TV = logits_TV[:, :vocab_size].double().log_softmax(1)
    return log_q_TV.gather(1, sampled_T[:, None])[:, 0], -(log_q_TV.exp() * log_q_TV).sum(1)


def response_logits(model: torch.nn.Module, token_ids: Sequence[int] | np.ndarray, prompt_len: int) -> Tensor:
    """Return the logits of a transformers model that predict the tokens after the prompt, [T, V]."""
    logits_NV: Tensor = model(torch.as_tensor(token_ids).long()[None]).logits[0]
    return logits_NV[prompt_len - 1 : -1]


def sample_logits(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Return the logits of a transformers model that predict the response tokens of a sample, [T, V]."""
    return response_logits(model, sample.token_ids, len(sample.prompt.ids))[sample.response.offsets_T.tolist()]


def response_logps(model: torch.nn.Module, token_ids: Sequence[int] | np.ndarray, prompt_len: int) -> np.ndarray:
    """Return the log-probabilities of all ids at each position after the prompt, [T, V]."""
    with torch.no_grad():
        return response_logits(model, token_ids, prompt_len).log_softmax(1).numpy()


def sampled_logps(model: torch.nn.Module, token_ids: Sequence[int] | np.ndarray, prompt_len: int) -> np.ndarray:
    """Return the log-probability of each token after the prompt, [T]."""
    ids_T1 = np.asarray(token_ids[prompt_len:], np.int64)[:, None]
    return np.take_along_axis(response_logps(model, token_ids, prompt_len), ids_T1, 1)[:, 0]


def forward_kl(samples: Sequence[tuple[Sample, Tensor]]) -> dict[str, Tensor]:
    """Return the mean forward KL divergence over all response tokens."""
    loss = torch.cat([forward_kl_T(sample, logits_TV) for sample, logits_TV in samples]).mean()
    return {"actor/loss": loss, "actor/kl_loss": loss}


def forward_kl_T(sample: Sample, logits_TV: Tensor) -> Tensor:
    """Return the forward KL divergence per token, with one bucket for all ids outside of the teacher's top-k."""
    p_TK = torch.as_tensor(sample.top_k.logps_TK).double().exp()
    q_TK = logits_TV.double().softmax(1).gather(1, torch.as_tensor(sample.top_k.ids_TK).long())
    p_TB, q_TB = (torch.cat([top, 1 - top.sum(1, keepdim=True)], 1) for top in (p_TK, q_TK))
    return (p_TB * (p_TB.log() - q_TB.log())).sum(1)


def train_reference(
    model: torch.nn.Module,
    batches: Iterable[Sequence[Sample]],
    objective: Objective = forward_kl,
    *,
    lr: float = LR,
    clip: float = 0.5,
    decay: float = 0.05,
) -> list[dict[str, float]]:
    """Train a transformers model with torch's AdamW, one sample at a time and one step per batch.

    Args:
        clip: Maximum gradient norm.
        decay: Weight decay of matrices, except joined biases.

    Returns:
        Metrics of each step.
    """
    named = dict(model.named_parameters())
    decayed = {name: p for name, p in named.items() if p.ndim > 1 and not name.endswith("bias")}
    others = [p for name, p in named.items() if name not in decayed]
    groups = [
        {"params": list(decayed.values()), "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=lr, betas=BETAS)
    metrics = []
    for batch in batches:
        samples = [sample for sample in batch if len(sample.response.ids)]
        losses = objective([(each, sample_logits(model, each)) for each in samples])
        adam.zero_grad()
        losses["actor/loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        found = {name: value.item() for name, value in losses.items()}
        n_tokens = float(sum(len(sample.response.ids) for sample in samples))
        metrics.append(found | {"actor/grad_norm": norm.item(), "actor/n_tokens": n_tokens})
    return metrics


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
    """Return the result of the first update on a batch, in float64."""
    model = read_model(folder, torch.float64)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    [metrics] = train_reference(model, [samples], clip=MAX_NORM, decay=0.0)
    step = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    return Update(metrics["actor/kl_loss"], metrics["actor/grad_norm"], step)
