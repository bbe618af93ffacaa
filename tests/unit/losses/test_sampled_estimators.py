"""Exact expectations of the one-sample estimators, as sums over all tokens y ~ q in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recipe_gkd.errors import ConfigError
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.registry import get_sampled_token_loss
from recipe_gkd.losses.sampled_token import importance_weights, k1, k2, k3
from tests._support.errors import raises

V = 37
GENERATOR = torch.Generator().manual_seed(0)
STUDENT, TEACHER, OLD_STUDENT = 1.5 * torch.randn(3, V, generator=GENERATOR, dtype=torch.float64)
LOG_P = TEACHER.log_softmax(0)


def kl_and_gradient(direction: str) -> tuple[Tensor, Tensor]:
    logits = STUDENT.clone().requires_grad_()
    log_q = logits.log_softmax(0)
    terms = log_q.exp() * (log_q - LOG_P) if direction == "reverse" else LOG_P.exp() * (LOG_P - log_q)
    return terms.sum().detach(), torch.autograd.grad(terms.sum(), logits)[0]


def sampled_logps(logits_V: Tensor) -> Tensor:
    """Return log q(y) of every token y, computed like in a loss: at V positions with the same logits."""
    query = LogitsQuery(
        ids_TK=torch.zeros(V, 0, dtype=torch.int64),
        valid_TK=torch.zeros(V, 0, dtype=torch.bool),
        sampled_T=torch.arange(V),
        vocab_size=V,
    )
    return compute_log_stats(logits_V.expand(V, V).clone(), query).sampled_logp_T


def expectation(estimator: str, **options: float) -> tuple[Tensor, Tensor]:
    """Return the expected value and the expected gradient for y ~ q."""
    logits = STUDENT.clone().requires_grad_()
    logp_T = sampled_logps(logits)
    loss_T = get_sampled_token_loss(estimator).function(logp_T, LOG_P, **options)
    mean = (logp_T.detach().exp() * loss_T).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


class TestEstimators:
    @pytest.mark.parametrize(
        "estimator, of_value, of_gradient",
        [("k1", "reverse", "reverse"), ("k2", None, "reverse"), ("k3", "reverse", "forward")],
    )
    def test_expectation_is_value_and_gradient_of_kl(
        self, estimator: str, of_value: str | None, of_gradient: str
    ) -> None:
        value, grad = expectation(estimator)
        if of_value:
            torch.testing.assert_close(value, kl_and_gradient(of_value)[0])
        torch.testing.assert_close(grad, kl_and_gradient(of_gradient)[1])

    def test_k1_baseline_keeps_expectation_and_scale_divides_it(self) -> None:
        value, grad = expectation("k1", baseline_T=0.7, scale_T=2.0)
        expected_value, expected_grad = kl_and_gradient("reverse")
        torch.testing.assert_close(value, expected_value)
        torch.testing.assert_close(grad, expected_grad / 2)

    def test_k1_as_plain_loss_has_zero_expected_gradient(self) -> None:
        """This is why k1 is a policy gradient here."""
        logits = STUDENT.clone().requires_grad_()
        logp_T = sampled_logps(logits)
        grad = torch.autograd.grad((logp_T.detach().exp() * (logp_T - LOG_P)).sum(), logits)[0]
        assert grad.abs().max() < 1e-15
        assert expectation("k1")[1].abs().max() > 0.01

    @pytest.mark.parametrize("estimator", [k2, k3])
    def test_k2_and_k3_are_never_negative_and_zero_for_equal_logprobs(self, estimator: Callable[..., Tensor]) -> None:
        logp_T, teacher_T = 3 * torch.randn(2, 100, dtype=torch.float64, generator=GENERATOR) - 5
        assert (estimator(logp_T, teacher_T) >= 0).all()
        assert (estimator(logp_T, logp_T) == 0).all()

    def test_k3_of_extreme_tokens_is_finite(self) -> None:
        logp_T = torch.tensor([-2e4, -50.0, 0.0], requires_grad=True)
        loss_T = k3(logp_T, torch.tensor([0.0, 0.0, -2e4]))
        loss_T.sum().backward()
        assert loss_T.isfinite().all() and logp_T.grad is not None and logp_T.grad.isfinite().all()


class TestImportanceWeights:
    @pytest.mark.parametrize("importance", ["truncate", "mask"])
    def test_without_effective_cap_give_gradient_of_reverse_kl(self, importance: str) -> None:
        """For y sampled from older weights the expected gradient is still that of reverse KL under q."""
        old_logp_T = OLD_STUDENT.log_softmax(0)
        logits = STUDENT.clone().requires_grad_()
        logp_T = sampled_logps(logits)
        weights_T = importance_weights(logp_T, old_logp_T, importance, cap=math.inf)
        assert not weights_T.requires_grad
        mean = (old_logp_T.exp() * weights_T * k1(logp_T, LOG_P)).sum()
        torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], kl_and_gradient("reverse")[1])

    def test_cap_introduces_bias_that_depends_on_baseline(self) -> None:
        old_logp_T = (STUDENT + 0.5 * OLD_STUDENT).log_softmax(0)

        def gradient(importance: str, cap: float, baseline: float) -> Tensor:
            logits = STUDENT.clone().requires_grad_()
            logp_T = sampled_logps(logits)
            weights_T = importance_weights(logp_T, old_logp_T, importance, cap)
            return torch.autograd.grad((old_logp_T.exp() * weights_T * k1(logp_T, LOG_P, baseline)).sum(), logits)[0]

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

    @pytest.mark.parametrize(
        ("importance", "expected"),
        [("none", [1, 1, 1, 1, 1, 1]), ("truncate", [0.5, 1.5, 2, 2, 2, 0]), ("mask", [0.5, 1.5, 2, 0, 0, 0])],
    )
    def test_ratios_around_cap(self, importance: str, expected: list[float]) -> None:
        logp_T = torch.cat([torch.tensor([0.5, 1.5, 2.0, 2.5]).log(), torch.tensor([1e5, -1e5])])
        weights_T = importance_weights(logp_T, torch.zeros(6), importance, cap=2.0)
        torch.testing.assert_close(weights_T, torch.tensor(expected).float(), rtol=1e-6, atol=1e-8)

    def test_unknown_mode_is_refused(self) -> None:
        with raises(ConfigError, keys=("gkd.importance",)):
            importance_weights(torch.zeros(1), torch.zeros(1), "clip", cap=2.0)
