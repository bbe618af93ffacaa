"""The same objectives, written the obvious way on whole float64 distributions, for autograd to differentiate.

One position after the other, with a python dict for the support. Nothing is shared with the code under test but the
names of the choices and, as a definition, what the teacher's tail has at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe_gkd.losses import Divergence

LEAST_TAIL = 2.0**-24


def dense_divergence(
    logits_TV: Tensor, logps_TK: Tensor, ids_TK: Tensor, divergence: Divergence, vocab_size: int
) -> Tensor:
    """Nats ``[T]``, float64; the arguments are those of :func:`recipe_gkd.losses.topk_divergence`."""
    losses = []
    for logits_V, logps_K, ids_K in zip(logits_TV[:, :vocab_size].double(), logps_TK.double(), ids_TK, strict=True):
        log_q_V = (logits_V / divergence.temperature).log_softmax(0)
        entries = zip(ids_K.tolist(), logps_K, strict=True)
        support = {id: logp for id, logp in entries if 0 <= id < vocab_size and logp > -torch.inf}
        p_C, log_q_C = shared_outcomes(log_q_V, support, divergence.tail)
        losses.append(of_distributions(p_C, log_q_C, divergence))
    return torch.stack(losses) if losses else logits_TV.double().sum(1)


def shared_outcomes(log_q_V: Tensor, support: dict[int, Tensor], tail: str) -> tuple[Tensor, Tensor]:
    """P and log q of the outcomes that the tail mode leaves."""
    ids = torch.tensor(list(support), dtype=torch.int64)
    p_C = torch.stack([logp.exp() for logp in support.values()]) if support else log_q_V.new_zeros(0)
    log_q_C = log_q_V[ids]
    if off := sorted(set(range(len(log_q_V))) - support.keys()):
        p_C = torch.cat([p_C, (1 - p_C.sum()).clamp(min=LEAST_TAIL)[None]])
        log_q_C = torch.cat([log_q_C, log_q_V[off].logsumexp(0)[None]])
    p_C = p_C / p_C.sum()
    if tail != "bucket":
        p_C, log_q_C = p_C[: len(ids)], log_q_C[: len(ids)]
    if tail == "renormalize":
        p_C, log_q_C = p_C / p_C.sum(), log_q_C.log_softmax(0)
    return p_C, log_q_C


def of_distributions(p_C: Tensor, log_q_C: Tensor, divergence: Divergence) -> Tensor:
    log_p_C, q_C = p_C.log(), log_q_C.exp()

    def log_mixture(teacher_share: float) -> Tensor:
        return (teacher_share * p_C + (1 - teacher_share) * q_C).log()

    def from_p(log_other_C: Tensor) -> Tensor:
        return (p_C * (log_p_C - log_other_C)).sum()

    def from_q(log_other_C: Tensor) -> Tensor:
        return (q_C * (log_q_C - log_other_C)).sum()

    b, r, a = divergence.beta, divergence.rkl_ratio, divergence.skew_alpha
    match divergence.kind:
        case "forward_kl":
            return from_p(log_q_C)
        case "reverse_kl":
            return from_q(log_p_C)
        case "kl_rkl":
            return (1 - r) * from_p(log_q_C) + r * from_q(log_p_C)
        case "jsd":
            return b * from_p(log_mixture(b)) + (1 - b) * from_q(log_mixture(b))
        case "skewed_forward_kl":
            return from_p(log_mixture(a))
        case "skewed_reverse_kl":
            return from_q(log_mixture(1 - a))
        case "tvd":
            return (p_C - q_C).abs().sum() / 2


def dense_picked_and_entropy(logits_TV: Tensor, sampled_T: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the picked ids, and the entropy, both of the whole distribution at temperature 1."""
    log_q_TV = logits_TV[:, :vocab_size].double().log_softmax(1)
    return log_q_TV.gather(1, sampled_T[:, None])[:, 0], -(log_q_TV.exp() * log_q_TV).sum(1)
