"""Mathematical properties of the divergences in float64: limits, bounds, and where they vanish."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import Divergence, topk_divergence
from recipe_gkd.losses.distributions import TAIL_MODES
from recipe_gkd.losses.registry import divergence_names
from tests._support.loss_cases import VOCABULARY, Case, divergences, make_case
from tests._support.loss_runs import loss_and_gradient


def random_pair(n_rows: int = 8, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return student logits and teacher log-probabilities on the same vocabulary, float64."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = spread * torch.randn(2, n_rows, VOCABULARY, generator=generator, dtype=torch.float64)
    return student, teacher.log_softmax(1)


def divergence_of(logits: Tensor, log_p: Tensor, divergence: Divergence, k: int = VOCABULARY) -> Tensor:
    logps, ids = log_p.topk(k, dim=1)
    return topk_divergence(logits, logps, ids, divergence, vocab_size=VOCABULARY)[0]


def divergence_on(logits: Tensor, log_p: Tensor, ids: Tensor, divergence: Divergence) -> Tensor:
    """Return the divergence on a support; -1 is an unused entry."""
    logps = log_p.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -math.inf)
    return topk_divergence(logits, logps, ids, divergence, vocab_size=VOCABULARY)[0]


def value_and_gradient(
    logits: Tensor, log_p: Tensor, divergence: Divergence, k: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = divergence_of(leaf, log_p, divergence, k)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


class TestTailModes:
    @pytest.mark.parametrize("kind", divergence_names())
    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    def test_whole_vocabulary_support_makes_modes_equal(self, kind: str, temperature: float) -> None:
        student, log_p = random_pair()
        results = [
            value_and_gradient(student, log_p, Divergence(kind=kind, tail=tail, temperature=temperature))
            for tail in TAIL_MODES
        ]
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("k", [1, 2, 17])
    def test_bucket_is_at_most_whole_vocabulary_divergence(self, k: int) -> None:
        """Check the data processing inequality: merging outcomes cannot increase a divergence."""
        student, log_p = random_pair(n_rows=64)
        for divergence in divergences():
            if divergence.tail == "bucket":
                whole = divergence_of(student, log_p, divergence)
                part = divergence_of(student, log_p, divergence, k)
                assert (part >= 0).all() and (part < whole).all(), divergence

    @pytest.mark.parametrize("kind", divergence_names())
    def test_bucket_rises_with_each_id_of_the_support(self, kind: str) -> None:
        """Check the support of teacher and student: a finer partition cannot decrease a divergence."""
        student, log_p = random_pair(n_rows=64)
        of_teacher, of_student = log_p.topk(4, dim=1).indices, student.topk(4, dim=1).indices
        repeated = (of_student[:, :, None] == of_teacher[:, None, :]).any(2)
        supports = {
            "teacher": of_teacher,
            "student": of_student,
            "union": torch.cat([of_teacher, of_student.masked_fill(repeated, -1)], dim=1),
            "all": torch.arange(VOCABULARY).expand(64, -1).flip(1),  # in any order
        }
        found = {name: divergence_on(student, log_p, ids, Divergence(kind=kind)) for name, ids in supports.items()}
        whole = divergence_of(student, log_p, Divergence(kind=kind))
        torch.testing.assert_close(found["all"], whole, rtol=1e-12, atol=1e-12)
        for part, finer in (("teacher", "union"), ("student", "union"), ("union", "all")):
            assert (found[part] <= found[finer] + 1e-12).all() and (found[part] < found[finer] - 1e-6).any()
        if kind == "reverse_kl":  # its expectation is over the student's mass
            assert found["student"].mean() > found["teacher"].mean()
        if kind == "forward_kl":
            assert found["teacher"].mean() > found["student"].mean()

    @pytest.mark.parametrize(("kind", "mass_increases"), [("forward_kl", True), ("reverse_kl", False)])
    def test_none_moves_equal_student_away(self, kind: str, mass_increases: bool) -> None:
        """Check the documented bias of the tail mode ``none``, and the direction in which it moves mass."""
        logits, _ = random_pair()
        log_p, divergence = logits.log_softmax(1), Divergence(kind=kind, tail="none")
        moved = logits - 0.01 * value_and_gradient(logits, log_p, divergence, k=3)[1]
        assert (divergence_of(moved, log_p, divergence, k=3) < 0).all()
        support = log_p.topk(3, dim=1).indices
        mass, mass_before = (rows.softmax(1).gather(1, support).sum(1) for rows in (moved, logits))
        assert ((mass > mass_before) == mass_increases).all()

    @pytest.mark.parametrize("kind", [kind for kind in divergence_names() if kind != "tvd"])
    def test_generalized_is_positive_except_for_an_equal_student(self, kind: str) -> None:
        """The minimum is at q = p on the support, which the tail mode ``none`` does not have."""
        student, log_p = random_pair()
        divergence = Divergence(kind=kind, tail="generalized")
        assert (divergence_of(student, log_p, divergence, k=3) > 0).all()
        value, gradient = value_and_gradient(log_p, log_p, divergence, k=3)
        assert value.abs().max() < 1e-12 and gradient.abs().max() < 1e-12


class TestValues:
    def test_kl_of_whole_vocabulary_equals_torch_kl_div(self) -> None:
        student, log_p = random_pair()
        log_q, kl_div = student.log_softmax(1), torch.nn.functional.kl_div
        forward = kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
        reverse = kl_div(log_p, log_q, reduction="none", log_target=True).sum(1)
        torch.testing.assert_close(divergence_of(student, log_p, Divergence(kind="forward_kl")), forward)
        torch.testing.assert_close(divergence_of(student, log_p, Divergence(kind="reverse_kl")), reverse)

    @pytest.mark.parametrize("k", [1, 11, VOCABULARY])
    def test_equal_student_has_no_loss_and_no_gradient(self, k: int) -> None:
        logits, _ = random_pair()
        for divergence in divergences():
            value, grad = value_and_gradient(logits, logits.log_softmax(1), divergence, k)
            assert value.abs().max() < 1e-12, divergence
            # |p - q| has a kink at p = q, where rounding decides the sign. A partial sum is not minimal at p = q: it
            # can fall with the student's mass on the support. Only jsd is flat there term by term.
            if divergence.kind == "tvd" or (divergence.tail == "none" and divergence.kind != "jsd" and k < VOCABULARY):
                continue
            assert grad.abs().max() < 1e-12, divergence

    def test_extreme_logits_respect_bounds(self) -> None:
        for k in (1, 17):
            case = make_case(k, 1.0)
            for divergence in divergences():
                value, _ = loss_and_gradient(case, divergence)
                if divergence.tail == "none":  # a partial sum is not a divergence
                    continue
                assert value.min() > -1e-6, divergence
                match divergence.kind:
                    case "tvd":
                        bound = 1.0
                    case "skewed_forward_kl" | "skewed_reverse_kl":
                        bound = -math.log(divergence.parameters["skew_alpha"])
                    case "jsd":
                        b = divergence.parameters["beta"]
                        bound = -b * math.log(b) - (1 - b) * math.log(1 - b)
                    case _:
                        continue
                assert value.max() < bound + 1e-6, divergence
                if divergence.tail == "bucket":  # K = 1 without a tail has one outcome, so the divergence is 0
                    assert value.max() > bound - 1e-3, f"no row comes near the bound: {divergence}"

    def test_order_of_entries_does_not_matter(self) -> None:
        case = make_case(17, 1.0)
        order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
        shuffled = Case(logits_TW=case.logits_TW, logps_TK=case.logps_TK[:, order], ids_TK=case.ids_TK[:, order])
        for divergence in divergences():
            if divergence.kind != "tvd":
                results = loss_and_gradient(shuffled, divergence), loss_and_gradient(case, divergence)
                torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


class TestLimits:
    def test_jsd_tends_to_both_directions_of_kl(self) -> None:
        student, log_p = random_pair()
        for beta, scale, kind in ((1e-7, 1e-7, "forward_kl"), (1 - 1e-7, 1e-7, "reverse_kl")):
            near = [
                part / scale
                for part in value_and_gradient(student, log_p, Divergence(kind="jsd", parameters={"beta": beta}))
            ]
            limit = value_and_gradient(student, log_p, Divergence(kind=kind))
            torch.testing.assert_close(tuple(near), limit, rtol=1e-3, atol=1e-4)

    def test_skewed_and_mixed_forms_tend_to_both_directions_of_kl(self) -> None:
        student, log_p = random_pair()
        forward, reverse = (
            value_and_gradient(student, log_p, Divergence(kind=kind)) for kind in ("forward_kl", "reverse_kl")
        )
        for near, limit in (
            (Divergence(kind="skewed_forward_kl", parameters={"skew_alpha": 1e-8}), forward),
            (Divergence(kind="skewed_reverse_kl", parameters={"skew_alpha": 1e-8}), reverse),
            (Divergence(kind="kl_rkl", parameters={"rkl_ratio": 0}), forward),
            (Divergence(kind="kl_rkl", parameters={"rkl_ratio": 1}), reverse),
        ):
            torch.testing.assert_close(value_and_gradient(student, log_p, near), limit, rtol=1e-4, atol=1e-4)


def test_forward_kl_gradient_equals_documented_formula() -> None:
    student, log_p = random_pair()
    ids = log_p.topk(5, dim=1).indices
    in_support = torch.zeros_like(student, dtype=torch.bool).scatter(1, ids, True)
    p, q = log_p.exp(), student.softmax(1)
    p_tail, q_tail = p.where(~in_support, 0).sum(1, keepdim=True), q.where(~in_support, 0).sum(1, keepdim=True)
    expected = (q - p).where(in_support, (1 - p_tail / q_tail) * q)
    torch.testing.assert_close(value_and_gradient(student, log_p, Divergence(), k=5)[1], expected)
