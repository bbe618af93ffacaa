"""Agreement with TRL's generalized JSD of GKD (Agarwal et al. 2024, arXiv:2306.13649, eq. 1).

With P the teacher and Q the student, both ``softmax(logits / temperature)`` of the whole vocabulary, TRL's GKD trainer
computes ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q``. For ``beta`` 0 and 1,
where this is zero, it computes ``KL(P || Q)`` and ``KL(Q || P)``. It does not multiply by the squared temperature.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import Divergence, topk_divergence

V = 61
TEMPERATURES = (0.5, 1.0, 2.0)
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)

TRL_STUDENT, TRL_TEACHER = [2.0, -1.0, 0.5, 0.0], [0.5, 1.5, -2.0, 0.25]
# (beta, temperature) -> value of TRL's formula for these logits, in float64.
TRL_VALUES = {
    (0.0, 0.5): 4.671388037734,
    (0.0, 1.0): 1.475014222938,
    (0.0, 2.0): 0.413149273759,
    (0.1, 0.5): 0.241925927649,
    (0.1, 1.0): 0.114277390529,
    (0.1, 2.0): 0.035764957347,
    (0.5, 0.5): 0.485002504654,
    (0.5, 1.0): 0.255828781773,
    (0.5, 2.0): 0.090926492130,
    (0.9, 0.5): 0.179192699372,
    (0.9, 1.0): 0.090308760889,
    (0.9, 2.0): 0.032042986360,
    (1.0, 0.5): 2.143889231249,
    (1.0, 1.0): 1.028019435758,
    (1.0, 2.0): 0.357494531163,
}


def formula(student_TV: Tensor, teacher_TV: Tensor, beta: float, temperature: float) -> Tensor:
    """Return the definition above on probabilities, [T]."""
    q_TV, p_TV = (student_TV / temperature).softmax(1), (teacher_TV / temperature).softmax(1)

    def kl(a_TV: Tensor, b_TV: Tensor) -> Tensor:
        return (a_TV * (a_TV / b_TV).log()).sum(1)

    if beta == 0:
        return kl(p_TV, q_TV)
    if beta == 1:
        return kl(q_TV, p_TV)
    mixture_TV = beta * p_TV + (1 - beta) * q_TV
    return beta * kl(p_TV, mixture_TV) + (1 - beta) * kl(q_TV, mixture_TV)


def installed_trl(student_TV: Tensor, teacher_TV: Tensor, beta: float, temperature: float) -> Tensor:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(
        student_TV[None], teacher_TV[None], beta=beta, temperature=temperature, reduction="none"
    )[0].sum(1)


REFERENCES = [formula, installed_trl] if importlib.util.find_spec("trl") else [formula]


def ours(student_TV: Tensor, teacher_TV: Tensor, beta: float, temperature: float) -> Tensor:
    divergence = Divergence(kind="jsd", temperature=temperature, parameters={"beta": beta})
    if beta in (0, 1):
        divergence = replace(divergence, kind="reverse_kl" if beta else "forward_kl")
    size = student_TV.size(1)
    logps_TK, ids_TK = (teacher_TV / temperature).log_softmax(1).topk(size, dim=1)
    return topk_divergence(student_TV, logps_TK, ids_TK, divergence, vocab_size=size)[0]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("reference", REFERENCES)
def test_jsd_of_whole_vocabulary_equals_reference(
    reference: Callable[..., Tensor], beta: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    student_TV, teacher_TV = 3 * torch.randn(2, 6, V, generator=generator, dtype=torch.float64)
    results = []
    for loss_of in (ours, reference):
        leaf_TV = student_TV.clone().requires_grad_()
        loss_T = loss_of(leaf_TV, teacher_TV, beta, temperature)
        results.append((loss_T.detach(), torch.autograd.grad(loss_T.sum(), leaf_TV)[0]))
    # TRL rounds beta to the dtype of the logits, and the two sum in different orders.
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
def test_jsd_equals_values_of_trl(beta: float, temperature: float) -> None:
    student_TV, teacher_TV = torch.tensor([[TRL_STUDENT], [TRL_TEACHER]], dtype=torch.float64)
    found = ours(student_TV, teacher_TV, beta, temperature).item()
    assert found == pytest.approx(TRL_VALUES[beta, temperature], rel=1e-9)
