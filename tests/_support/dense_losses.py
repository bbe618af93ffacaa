"""Reference losses on dense float64 distributions, differentiated by autograd.

They take one position at a time and keep the support in a dict. They share only the names of the choices and the
definition of the smallest teacher tail with the code under test.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe_gkd.losses import Divergence

MIN_TAIL_MASS = 2.0**-24


def dense_divergence(
    logits_TV: Tensor, logps_TK: Tensor, ids_TK: Tensor, divergence: Divergence, vocab_size: int
) -> Tensor:
    """Return the divergence in nats, float64 [T]; arguments as in :func:`recipe_gkd.losses.topk_divergence`."""
    losses = []
    for logits_V, logps_K, ids_K in zip(logits_TV[:, :vocab_size].double(), logps_TK.double(), ids_TK, strict=True):
        log_q_V = (logits_V / divergence.temperature).log_softmax(0)
        entries = zip(ids_K.tolist(), logps_K, strict=True)
        support = {id: logp for id, logp in entries if 0 <= id < vocab_size and logp > -torch.inf}
        p_C, log_q_C = outcomes(log_q_V, support, divergence.tail)
        losses.append(divergence_of(p_C, log_q_C, divergence))
    return torch.stack(losses) if losses else logits_TV.double().sum(1)


def outcomes(log_q_V: Tensor, support: dict[int, Tensor], tail: str) -> tuple[Tensor, Tensor]:
    """Return p and log q on the outcomes of a tail mode."""
    ids = torch.tensor(list(support), dtype=torch.int64)
    p_C = torch.stack([logp.exp() for logp in support.values()]) if support else log_q_V.new_zeros(0)
    log_q_C = log_q_V[ids]
    if other_ids := sorted(set(range(len(log_q_V))) - support.keys()):
        p_C = torch.cat([p_C, (1 - p_C.sum()).clamp(min=MIN_TAIL_MASS)[None]])
        log_q_C = torch.cat([log_q_C, log_q_V[other_ids].logsumexp(0)[None]])
    p_C = p_C / p_C.sum()
    if tail != "bucket":
        p_C, log_q_C = p_C[: len(ids)], log_q_C[: len(ids)]
    if tail == "renormalize":
        p_C, log_q_C = p_C / p_C.sum(), log_q_C.log_softmax(0)
    return p_C, log_q_C


def divergence_of(p_C: Tensor, log_q_C: Tensor, divergence: Divergence) -> Tensor:
    """Return the divergence of two distributions on the same outcomes."""
    log_p_C, q_C = p_C.log(), log_q_C.exp()

    def log_mixture(teacher_weight: float) -> Tensor:
        return (teacher_weight * p_C + (1 - teacher_weight) * q_C).log()

    def kl_from_p(log_other_C: Tensor) -> Tensor:
        return (p_C * (log_p_C - log_other_C)).sum() + of_measures(p_C, log_other_C)

    def kl_from_q(log_other_C: Tensor) -> Tensor:
        return (q_C * (log_q_C - log_other_C)).sum() + of_measures(q_C, log_other_C)

    def of_measures(one_C: Tensor, log_other_C: Tensor) -> Tensor:
        return (log_other_C.exp() - one_C).sum() * (divergence.tail == "generalized")

    values = {"beta": 0.5, "rkl_ratio": 0.5, "skew_alpha": 0.1} | dict(divergence.parameters)
    b, r, a = values["beta"], values["rkl_ratio"], values["skew_alpha"]
    match divergence.kind:
        case "forward_kl":
            return kl_from_p(log_q_C)
        case "reverse_kl":
            return kl_from_q(log_p_C)
        case "kl_rkl":
            return (1 - r) * kl_from_p(log_q_C) + r * kl_from_q(log_p_C)
        case "jsd":
            return b * kl_from_p(log_mixture(b)) + (1 - b) * kl_from_q(log_mixture(b))
        case "skewed_forward_kl":
            return kl_from_p(log_mixture(a))
        case "skewed_reverse_kl":
            return kl_from_q(log_mixture(1 - a))
        case "tvd":
            return (p_C - q_C).abs().sum() / 2
    raise AssertionError(f"add a dense reference of the divergence {divergence.kind!r} here")
