"""What the estimators with one sampled token expect: the sum over all tokens y ~ q, exact in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.sampled_token import Importance, importance_weights, k1, k2, k3

V = 37
GENERATOR = torch.Generator().manual_seed(0)
STUDENT, TEACHER, OLDER_STUDENT = 1.5 * torch.randn(3, V, generator=GENERATOR, dtype=torch.float64)
LOG_P = TEACHER.log_softmax(0)


def kl_and_gradient(direction: str) -> tuple[Tensor, Tensor]:
    logits = STUDENT.clone().requires_grad_()
    log_q = logits.log_softmax(0)
    terms = log_q.exp() * (log_q - LOG_P) if direction == "reverse" else LOG_P.exp() * (LOG_P - log_q)
    return terms.sum().detach(), torch.autograd.grad(terms.sum(), logits)[0]


def picked_logps(logits_V: Tensor) -> Tensor:
    """Log q(y) of every token y, as a loss reads them: at V positions with the same logits."""
    query = LogitsQuery(
        ids_TK=torch.zeros(V, 0, dtype=torch.int64),
        valid_TK=torch.zeros(V, 0, dtype=torch.bool),
        sampled_T=torch.arange(V),
        vocab_size=V,
    )
    return compute_log_stats(logits_V.expand(V, V).clone(), query).sampled_logp_T


def expectation(estimator: str, **options: float) -> tuple[Tensor, Tensor]:
    """Of the value and of the gradient, y ~ q."""
    logits = STUDENT.clone().requires_grad_()
    logp_T = picked_logps(logits)
    loss_T = {"k1": k1, "k2": k2, "k3": k3}[estimator](logp_T, LOG_P, **options)
    mean = (logp_T.detach().exp() * loss_T).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


@pytest.mark.parametrize(
    "estimator, of_value, of_gradient",
    [("k1", "reverse", "reverse"), ("k2", None, "reverse"), ("k3", "reverse", "forward")],
)
def test_expected_value_and_gradient(estimator: str, of_value: str | None, of_gradient: str) -> None:
    value, grad = expectation(estimator)
    if of_value:
        torch.testing.assert_close(value, kl_and_gradient(of_value)[0])
    torch.testing.assert_close(grad, kl_and_gradient(of_gradient)[1])


def test_baseline_of_k1_changes_no_expectation_and_the_scale_divides() -> None:
    value, grad = expectation("k1", baseline_T=0.7, scale_T=2.0)
    want_value, want_grad = kl_and_gradient("reverse")
    torch.testing.assert_close(value, want_value)
    torch.testing.assert_close(grad, want_grad / 2)


def test_value_of_k1_as_a_plain_loss_would_have_a_gradient_without_the_teacher() -> None:
    """Its expectation is zero, which is why k1 is a policy gradient here."""
    logits = STUDENT.clone().requires_grad_()
    logp_T = picked_logps(logits)
    grad = torch.autograd.grad((logp_T.detach().exp() * (logp_T - LOG_P)).sum(), logits)[0]
    assert grad.abs().max() < 1e-15
    assert expectation("k1")[1].abs().max() > 0.01


def test_k2_and_k3_are_never_negative_and_vanish_for_equal_logprobs() -> None:
    logp_T, teacher_T = torch.randn(2, 100, dtype=torch.float64) * 3 - 5
    for estimator in (k2, k3):
        assert (estimator(logp_T, teacher_T) >= 0).all()
        assert (estimator(logp_T, logp_T) == 0).all()


def test_hopeless_tokens_leave_k3_finite() -> None:
    logp_T = torch.tensor([-2e4, -50.0, 0.0], requires_grad=True)
    loss_T = k3(logp_T, torch.tensor([0.0, 0.0, -2e4]))
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and logp_T.grad is not None and logp_T.grad.isfinite().all()


def test_importance_weights_make_an_older_sample_one_of_the_student() -> None:
    """Y ~ an older q: without a cap in the way, the expected gradient is still that of reverse KL under q."""
    older = OLDER_STUDENT.log_softmax(0)
    logits = STUDENT.clone().requires_grad_()
    logp_T = picked_logps(logits)
    for importance in ("truncate", "mask"):
        weights_T = importance_weights(logp_T, older, importance, cap=math.inf)
        assert not weights_T.requires_grad
        mean = (older.exp() * weights_T * k1(logp_T, LOG_P)).sum()
        grad = torch.autograd.grad(mean, logits, retain_graph=True)[0]
        torch.testing.assert_close(grad, kl_and_gradient("reverse")[1])


def test_a_cap_on_importance_weights_is_biased_and_a_baseline_is_then_not_free_of_it() -> None:
    older = (STUDENT + 0.5 * OLDER_STUDENT).log_softmax(0)

    def gradient(importance: Importance, cap: float, baseline: float) -> Tensor:
        logits = STUDENT.clone().requires_grad_()
        logp_T = picked_logps(logits)
        weights_T = importance_weights(logp_T, older, importance, cap)
        return torch.autograd.grad((older.exp() * weights_T * k1(logp_T, LOG_P, baseline)).sum(), logits)[0]

    exact = kl_and_gradient("reverse")[1]
    biases = {
        (importance, baseline): float((gradient(importance, 2.0, baseline) - exact).norm() / exact.norm())
        for importance in ("truncate", "mask")
        for baseline in (0.0, -2.0)
    }
    assert biases["mask", 0.0] > biases["truncate", 0.0] > 1e-3
    for importance in ("truncate", "mask"):
        assert abs(biases[importance, 0.0] - biases[importance, -2.0]) > 1e-3
        torch.testing.assert_close(gradient(importance, math.inf, -2.0), exact)


def test_importance_weights_at_and_above_their_cap() -> None:
    logp_T, older_T = torch.cat([torch.tensor([0.5, 1.5, 2.0, 2.5]).log(), torch.tensor([1e5, -1e5])]), torch.zeros(6)
    weights = {name: importance_weights(logp_T, older_T, name, cap=2.0) for name in ("none", "truncate", "mask")}
    torch.testing.assert_close(weights["none"], torch.ones(6))
    torch.testing.assert_close(weights["truncate"], torch.tensor([0.5, 1.5, 2, 2, 2, 0]), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(weights["mask"], torch.tensor([0.5, 1.5, 2, 0, 0, 0]), rtol=1e-6, atol=1e-8)
