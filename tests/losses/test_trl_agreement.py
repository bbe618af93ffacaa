"""An independent implementation of the generalised JSD, where it is installed: TRL's, on the full vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import Divergence, topk_divergence

pytest.importorskip("trl", reason="compares with TRL, which is not installed")
gkd_trainer = pytest.importorskip(
    "trl.experimental.gkd.gkd_trainer", reason="TRL is here, but its GKD trainer cannot be imported"
)

V = 61


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_full_vocabulary_agrees_in_value_and_gradient(beta: float, temperature: float) -> None:
    """TRL's beta is ours: the teacher's share of the mixture. At 0 and 1, where the JSD itself is zero, TRL has the
    two directions of KL instead, as the JSD divided by beta or 1 - beta tends to."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, 6, V, generator=generator, dtype=torch.float64)
    divergence = Divergence(kind="jsd", beta=beta, temperature=temperature)
    if beta in (0, 1):
        divergence = replace(divergence, kind="reverse_kl" if beta else "forward_kl")

    def theirs(logits: Tensor) -> Tensor:
        found = gkd_trainer.GKDTrainer.generalized_jsd_loss(
            logits[None], teacher[None], beta=beta, temperature=temperature, reduction="sum"
        )
        assert isinstance(found, Tensor)
        return found

    def ours(logits: Tensor) -> Tensor:
        logps, ids = (teacher / temperature).log_softmax(1).topk(V, dim=1)
        return topk_divergence(logits, logps, ids, divergence, vocab_size=V)[0].sum()

    results = []
    for loss_of in (ours, theirs):
        leaf = student.clone().requires_grad_()
        loss = loss_of(leaf)
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    # TRL rounds beta to the dtype of the logits and sums in another order.
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)
