"""The analytic gradient as a citizen of autograd: backward twice, in place, recomputed, in half precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_gkd.losses import Divergence, topk_divergence
from tests.unit.losses.cases import VOCABULARY, divergences, make_case
from tests.unit.losses.runs import own

CASE = make_case(17, 1.0)


def loss_of(logits: Tensor, divergence: Divergence, *, in_place: bool = False, chunk_tokens: int | None = 4) -> Tensor:
    return topk_divergence(
        logits,
        CASE.logps_TK,
        CASE.ids_TK,
        divergence,
        vocab_size=VOCABULARY,
        in_place=in_place,
        chunk_tokens=chunk_tokens,
    )[0].sum()


def test_backward_twice_gives_the_same_gradient() -> None:
    logits = CASE.logits_TW.clone().requires_grad_()
    for divergence in divergences() + divergences(2.0):
        loss = loss_of(logits, divergence)
        first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(loss, logits)[0], first)
    assert torch.equal(logits, CASE.logits_TW)


def test_in_place_gives_the_same_gradient_in_the_memory_of_the_logits() -> None:
    for divergence in divergences() + divergences(2.0):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert torch.equal(own(CASE, divergence, dtype, 4, True)[1], own(CASE, divergence, dtype, 4, False)[1])
    leaf = CASE.logits_TW.clone().requires_grad_()
    logits = leaf.clone()
    grad = torch.autograd.grad(loss_of(logits, Divergence(), in_place=True), logits)[0]
    assert grad.data_ptr() == logits.data_ptr()


def test_second_backward_in_place_ends_with_the_error_about_a_modified_tensor() -> None:
    leaf = CASE.logits_TW.clone().requires_grad_()
    loss = loss_of(leaf.clone(), Divergence(), in_place=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_use_of_logits_that_were_overwritten_ends_with_the_same_error() -> None:
    leaf = CASE.logits_TW.clone().requires_grad_()
    logits = leaf.clone()
    squares = logits.square().sum()
    loss_of(logits, Divergence(), in_place=True).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_activation_recompute_gives_the_same_gradient(in_place: bool, use_reentrant: bool) -> None:
    hidden = torch.randn(len(CASE.logits_TW), 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(CASE.logits_TW.shape[1], 8, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def head(hidden: Tensor) -> Tensor:
        return loss_of(hidden @ weight.T, Divergence(kind="jsd", temperature=2.0), in_place=in_place)

    want = torch.autograd.grad(head(hidden), (hidden, weight))
    loss = checkpoint(head, hidden, use_reentrant=use_reentrant)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.equal(hidden.grad, want[0]) and torch.equal(weight.grad, want[1])


def test_bfloat16_logits_are_computed_in_float32() -> None:
    for divergence in divergences() + divergences(2.0):
        loss, grad = own(CASE, divergence, torch.bfloat16)
        want_loss, want_grad = own(CASE, divergence, torch.float32)
        assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
        assert torch.equal(loss, want_loss) and torch.equal(grad, want_grad.bfloat16())


def test_logits_that_need_no_gradient_are_left_alone() -> None:
    logits = CASE.logits_TW.clone()
    loss = loss_of(logits, Divergence(), in_place=True)
    assert not loss.requires_grad and torch.equal(logits, CASE.logits_TW)


def test_columns_that_are_a_view_of_a_larger_tensor_are_read_and_written_alone() -> None:
    """As a shard of the vocabulary, or the answer's part of a packed sequence, arrives."""
    divergence = Divergence(kind="reverse_kl")
    want = own(CASE, divergence, chunk_tokens=4)[1]
    wide = torch.full((2 * len(CASE.logits_TW), CASE.logits_TW.shape[1] + 5), 7.0)
    leaf = wide.requires_grad_()
    for in_place in (False, True):
        base = leaf.clone()
        logits = base[::2, 3 : 3 + CASE.logits_TW.shape[1]]
        logits.data.copy_(CASE.logits_TW)
        weights = torch.linspace(0.5, 2, len(logits))
        loss, _ = topk_divergence(
            logits, CASE.logps_TK, CASE.ids_TK, divergence, vocab_size=VOCABULARY, in_place=in_place, chunk_tokens=4
        )
        grad = torch.autograd.grad((loss * weights).sum(), leaf)[0]
        torch.testing.assert_close(grad[::2, 3 : 3 + CASE.logits_TW.shape[1]], want, rtol=1e-6, atol=1e-7)
        assert (grad[1::2] == 0).all() and (grad[:, :3] == 0).all() and (grad[:, -2:] == 0).all()
