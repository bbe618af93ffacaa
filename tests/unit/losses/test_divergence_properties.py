"""What theory says of the divergences, in float64: limits, bounds, where they vanish."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import Divergence, topk_divergence
from tests.unit.losses.cases import KINDS, TAILS, VOCABULARY, Case, divergences, make_case
from tests.unit.losses.runs import own


def two_distributions(rows: int = 8, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits of a student, log-probabilities of a teacher, float64, on the same vocabulary."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = spread * torch.randn(2, rows, VOCABULARY, generator=generator, dtype=torch.float64)
    return student, teacher.log_softmax(1)


def divergence_of(logits: Tensor, log_p: Tensor, divergence: Divergence, k: int = VOCABULARY) -> Tensor:
    logps, ids = log_p.topk(k, dim=1)
    return topk_divergence(logits, logps, ids, divergence, vocab_size=VOCABULARY)[0]


def value_and_gradient(
    logits: Tensor, log_p: Tensor, divergence: Divergence, k: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = divergence_of(leaf, log_p, divergence, k)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_tail_modes_agree_when_every_id_is_in_the_support(kind: str, temperature: float) -> None:
    student, log_p = two_distributions()
    results = [
        value_and_gradient(student, log_p, Divergence(kind=kind, tail=tail, temperature=temperature))  # type: ignore[arg-type]
        for tail in TAILS
    ]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


def test_whole_vocabulary_is_the_ordinary_divergence() -> None:
    student, log_p = two_distributions()
    log_q, kl_div = student.log_softmax(1), torch.nn.functional.kl_div
    forward = kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
    reverse = kl_div(log_p, log_q, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(divergence_of(student, log_p, Divergence(kind="forward_kl")), forward)
    torch.testing.assert_close(divergence_of(student, log_p, Divergence(kind="reverse_kl")), reverse)


@pytest.mark.parametrize("k", [1, 11, VOCABULARY])
def test_student_that_equals_the_teacher_has_no_loss_and_no_gradient(k: int) -> None:
    logits, _ = two_distributions()
    for divergence in divergences():
        value, grad = value_and_gradient(logits, logits.log_softmax(1), divergence, k)
        assert value.abs().max() < 1e-12, divergence
        # |p - q| has a kink at p = q, where rounding decides the sign. And a sum over a part of the outcomes is not
        # least at p = q: it can fall with the student's mass on the support. Only jsd is flat there term by term.
        if divergence.kind == "tvd" or (divergence.tail == "none" and divergence.kind != "jsd" and k < VOCABULARY):
            continue
        assert grad.abs().max() < 1e-12, divergence


@pytest.mark.parametrize(("kind", "goes_to_the_support"), [("forward_kl", True), ("reverse_kl", False)])
def test_sum_over_the_support_alone_pulls_an_equal_student_away(kind: str, goes_to_the_support: bool) -> None:
    """The bias of the tail mode ``none`` that its documentation warns of, and where it leads to."""
    logits, _ = two_distributions()
    log_p, divergence = logits.log_softmax(1), Divergence(kind=kind, tail="none")  # type: ignore[arg-type]
    moved = logits - 0.01 * value_and_gradient(logits, log_p, divergence, k=3)[1]
    assert (divergence_of(moved, log_p, divergence, k=3) < 0).all()
    support = log_p.topk(3, dim=1).indices
    mass, mass_before = (rows.softmax(1).gather(1, support).sum(1) for rows in (moved, logits))
    assert ((mass > mass_before) == goes_to_the_support).all()


@pytest.mark.parametrize("k", [1, 2, 17])
def test_bucket_is_at_most_the_divergence_of_the_whole_vocabulary(k: int) -> None:
    """Data processing: to look at fewer outcomes cannot tell two distributions better apart."""
    student, log_p = two_distributions(rows=64)
    for divergence in divergences():
        if divergence.tail == "bucket":
            whole = divergence_of(student, log_p, divergence)
            part = divergence_of(student, log_p, divergence, k)
            assert (part >= 0).all() and (part < whole).all(), divergence


def test_bounds_hold_for_extreme_logits() -> None:
    for k in (1, 17):
        case = make_case(k, 1.0)
        for divergence in divergences():
            value, _ = own(case, divergence)
            if divergence.tail == "none":  # the sum of a part is no divergence
                continue
            assert value.min() > -1e-6, divergence
            match divergence.kind:
                case "tvd":
                    most = 1.0
                case "skewed_forward_kl" | "skewed_reverse_kl":
                    most = -math.log(divergence.skew_alpha)
                case "jsd":
                    b = divergence.beta
                    most = -b * math.log(b) - (1 - b) * math.log(1 - b)
                case _:
                    continue
            assert value.max() < most + 1e-6, divergence
            if divergence.tail == "bucket":  # with K = 1 and no tail there is one outcome, and nothing to compare
                assert value.max() > most - 1e-3, f"no row comes near the bound: {divergence}"


def test_limits_of_jsd_are_the_two_directions_of_kl() -> None:
    student, log_p = two_distributions()
    for beta, scale, kind in ((1e-7, 1e-7, "forward_kl"), (1 - 1e-7, 1e-7, "reverse_kl")):
        near = [part / scale for part in value_and_gradient(student, log_p, Divergence(kind="jsd", beta=beta))]
        limit = value_and_gradient(student, log_p, Divergence(kind=kind))  # type: ignore[arg-type]
        torch.testing.assert_close(tuple(near), limit, rtol=1e-3, atol=1e-4)


def test_limits_of_the_skewed_and_of_the_mixed_forms_are_the_two_directions_of_kl() -> None:
    student, log_p = two_distributions()
    forward, reverse = (
        value_and_gradient(student, log_p, Divergence(kind=kind)) for kind in ("forward_kl", "reverse_kl")
    )
    for near, limit in (
        (Divergence(kind="skewed_forward_kl", skew_alpha=1e-8), forward),
        (Divergence(kind="skewed_reverse_kl", skew_alpha=1e-8), reverse),
        (Divergence(kind="kl_rkl", rkl_ratio=0), forward),
        (Divergence(kind="kl_rkl", rkl_ratio=1), reverse),
    ):
        torch.testing.assert_close(value_and_gradient(student, log_p, near), limit, rtol=1e-4, atol=1e-4)


def test_forward_kl_has_the_gradient_that_its_documentation_states() -> None:
    student, log_p = two_distributions()
    ids = log_p.topk(5, dim=1).indices
    on = torch.zeros_like(student, dtype=torch.bool).scatter(1, ids, True)
    p, q = log_p.exp(), student.softmax(1)
    p_tail, q_tail = p.where(~on, 0).sum(1, keepdim=True), q.where(~on, 0).sum(1, keepdim=True)
    want = (q - p).where(on, (1 - p_tail / q_tail) * q)
    torch.testing.assert_close(value_and_gradient(student, log_p, Divergence(), k=5)[1], want)


def test_order_of_the_teachers_entries_is_of_no_importance() -> None:
    case = make_case(17, 1.0)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    shuffled = Case(logits_TW=case.logits_TW, logps_TK=case.logps_TK[:, order], ids_TK=case.ids_TK[:, order])
    for divergence in divergences():
        if divergence.kind != "tvd":
            torch.testing.assert_close(own(shuffled, divergence), own(case, divergence), rtol=1e-5, atol=1e-5)
