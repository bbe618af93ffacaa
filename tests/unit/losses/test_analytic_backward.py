"""The analytic gradient under autograd: second backward pass, in-place gradient, recomputation, half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_gkd.losses import Divergence, topk_divergence
from tests._support.loss_cases import VOCABULARY, divergences, make_case
from tests._support.loss_runs import loss_and_gradient

CASE = make_case(17, 1.0)


def total_loss(
    logits: Tensor, divergence: Divergence, *, in_place: bool = False, chunk_tokens: int | None = 4
) -> Tensor:
    loss_T, _ = topk_divergence(
        logits,
        CASE.logps_TK,
        CASE.ids_TK,
        divergence,
        vocab_size=VOCABULARY,
        in_place=in_place,
        chunk_tokens=chunk_tokens,
    )
    return loss_T.sum()


def test_second_backward_gives_same_gradient() -> None:
    logits = CASE.logits_TW.clone().requires_grad_()
    for divergence in divergences() + divergences(2.0):
        loss = total_loss(logits, divergence)
        first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(loss, logits)[0], first)
    assert torch.equal(logits, CASE.logits_TW)


class TestInPlace:
    def test_gradient_is_the_same_in_the_memory_of_the_logits(self) -> None:
        for divergence in divergences() + divergences(2.0):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                in_place, fresh = (loss_and_gradient(CASE, divergence, dtype, 4, flag)[1] for flag in (True, False))
                assert torch.equal(in_place, fresh)
        leaf = CASE.logits_TW.clone().requires_grad_()
        logits = leaf.clone()
        grad = torch.autograd.grad(total_loss(logits, Divergence(), in_place=True), logits)[0]
        assert grad.data_ptr() == logits.data_ptr()

    def test_second_backward_raises_modified_tensor_error(self) -> None:
        leaf = CASE.logits_TW.clone().requires_grad_()
        loss = total_loss(leaf.clone(), Divergence(), in_place=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_other_use_of_overwritten_logits_raises_modified_tensor_error(self) -> None:
        leaf = CASE.logits_TW.clone().requires_grad_()
        logits = leaf.clone()
        squares = logits.square().sum()
        total_loss(logits, Divergence(), in_place=True).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()

    def test_logits_without_gradient_are_unchanged(self) -> None:
        logits = CASE.logits_TW.clone()
        loss = total_loss(logits, Divergence(), in_place=True)
        assert not loss.requires_grad and torch.equal(logits, CASE.logits_TW)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_activation_recomputation_gives_same_gradient(in_place: bool, use_reentrant: bool) -> None:
    hidden = torch.randn(len(CASE.logits_TW), 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(CASE.logits_TW.shape[1], 8, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def head(hidden: Tensor) -> Tensor:
        return total_loss(hidden @ weight.T, Divergence(kind="jsd", temperature=2.0), in_place=in_place)

    expected = torch.autograd.grad(head(hidden), (hidden, weight))
    loss = checkpoint(head, hidden, use_reentrant=use_reentrant)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.equal(hidden.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_bfloat16_logits_are_computed_in_float32() -> None:
    for divergence in divergences() + divergences(2.0):
        loss, grad = loss_and_gradient(CASE, divergence, torch.bfloat16)
        expected_loss, expected_grad = loss_and_gradient(CASE, divergence, torch.float32)
        assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
        assert torch.equal(loss, expected_loss) and torch.equal(grad, expected_grad.bfloat16())


def test_view_of_larger_tensor_is_the_only_memory_used() -> None:
    """A shard of the vocabulary and the response part of a packed sequence are such views."""
    divergence = Divergence(kind="reverse_kl")
    expected = loss_and_gradient(CASE, divergence, chunk_tokens=4)[1]
    leaf = torch.full((2 * len(CASE.logits_TW), CASE.logits_TW.shape[1] + 5), 7.0).requires_grad_()
    columns = slice(3, 3 + CASE.logits_TW.shape[1])
    for in_place in (False, True):
        logits = leaf.clone()[::2, columns]
        logits.data.copy_(CASE.logits_TW)
        weights = torch.linspace(0.5, 2, len(logits))
        loss, _ = topk_divergence(
            logits, CASE.logps_TK, CASE.ids_TK, divergence, vocab_size=VOCABULARY, in_place=in_place, chunk_tokens=4
        )
        grad = torch.autograd.grad((loss * weights).sum(), leaf)[0]
        torch.testing.assert_close(grad[::2, columns], expected, rtol=1e-6, atol=1e-7)
        assert (grad[1::2] == 0).all() and (grad[:, :3] == 0).all() and (grad[:, -2:] == 0).all()
