"""forward_kl is the divergence that it says it is: value and gradient against float64 autograd, written densely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe_gkd.losses import forward_kl, vocab_parallel
from tests.losses.dense import check_shard, dense_forward_kl, random_case, row_weights
from tests.worker_pool import WorkerPool

V = 93
PADDED = 96
Case = tuple[Tensor, Tensor, Tensor, int]


def one_id_teacher() -> Case:
    logits, logps, ids = random_case(6, PADDED, 4, vocab_size=V, teacher_vocab=V, scale=3)
    return logits, torch.tensor([0.0, *[-torch.inf] * 3]).expand_as(logps).clone(), ids, V


def entries_missing() -> Case:
    """Rows filled up with id 0 at probability zero, and one row without any entry."""
    logits, logps, ids = random_case(6, PADDED, 5, vocab_size=V, teacher_vocab=V, scale=2)
    logps[:, 3:], ids[:, 3:] = -torch.inf, 0
    logps[2] = -torch.inf
    return logits, logps, ids, V


def all_cases() -> dict[str, Case]:
    def case(k: int, scale: float = 2.0, teacher_vocab: int = V, seed: int = 0) -> Case:
        return *random_case(9, PADDED, k, vocab_size=V, teacher_vocab=teacher_vocab, scale=scale, seed=seed), V

    return {
        "top 1": case(1),
        "top 2": case(2),
        "top 17": case(17),
        "whole vocabulary": case(V),
        "larger teacher vocabulary": case(40, teacher_vocab=140),
        "smaller teacher vocabulary": case(17, teacher_vocab=60),
        "extreme logits": case(17, scale=300.0, seed=3),
        "one-id teacher": one_id_teacher(),
        "entries missing": entries_missing(),
        "no positions": tuple(t[:0] if isinstance(t, Tensor) else t for t in case(2)),  # type: ignore[dict-item]
    }


def dense(case: Case) -> tuple[Tensor, Tensor]:
    logits = case[0].double().requires_grad_()
    loss = dense_forward_kl(logits, *case[1:])
    (loss * row_weights(loss)).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def own(case: Case) -> tuple[Tensor, Tensor]:
    logits = case[0].clone().requires_grad_()
    loss, _ = forward_kl(logits, case[1], case[2], vocab_size=case[3])
    (loss * row_weights(loss)).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float = 3e-6) -> None:
    torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1].double(), want[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", all_cases())
def test_value_and_gradient_equal_dense_float64(name: str) -> None:
    case = all_cases()[name]
    assert_same(own(case), dense(case))


@pytest.mark.parametrize("name", all_cases())
def test_float64_logits_reach_float64_accuracy(name: str) -> None:
    logits, *rest = all_cases()[name]
    case = (logits.double(), *rest)
    assert_same(own(case), dense(case), tolerance=1e-11)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.timeout(120)
def test_any_tensor_parallel_size_gives_the_dense_result(pool: WorkerPool, world_size: int) -> None:
    cases = all_cases()
    ranks = pool.run(world_size, check_shard, list(cases.values()))
    for index, (name, case) in enumerate(cases.items()):
        want_loss, want_grad = dense(case)
        grad = torch.cat([ranks[rank][index][1] for rank in range(world_size)], dim=1)
        for rank in range(world_size):
            loss, _, diagnostics = ranks[rank][index]
            assert_same((loss, grad), (want_loss, want_grad))
            _, want = forward_kl(case[0], case[1], case[2], vocab_size=V)
            torch.testing.assert_close(diagnostics, want, msg=lambda text, name=name: f"{name}: {text}")


def test_gradient_sums_to_zero_over_the_vocabulary_and_is_zero_in_its_padding() -> None:
    for name, case in all_cases().items():
        grad = own((case[0].double(), *case[1:]))[1]
        assert grad.sum(1).abs().lt(1e-12).all(), name
        assert (grad[:, V:] == 0).all(), name


def test_loss_and_gradient_vanish_where_the_student_equals_the_teacher() -> None:
    student = torch.randn(5, V, dtype=torch.float64)
    logps, ids = student.log_softmax(1).topk(11, dim=1)
    loss, grad = own((student, logps, ids, V))
    assert loss.abs().max() < 1e-12 and grad.abs().max() < 1e-12


def test_whole_vocabulary_is_the_ordinary_divergence() -> None:
    logits, logps, ids, _ = all_cases()["whole vocabulary"]
    teacher = torch.empty(len(ids), V).scatter_(1, ids, logps)
    want = torch.nn.functional.kl_div(logits[:, :V].log_softmax(1), teacher, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(forward_kl(logits, logps, ids, vocab_size=V)[0], want, rtol=2e-6, atol=2e-6)


def test_tail_far_below_float32_resolution_of_one_still_has_its_gradient() -> None:
    """The student gives the teacher's tail e^-200: 1 - sum(q) is 0 in any float, the logarithm is not."""
    logits = torch.full((1, V), -100.0)
    logits[0, 0] = 100.0
    case = (logits, torch.tensor([[0.9]]).log(), torch.tensor([[0]]), V)
    assert_same(own(case), dense(case))
    assert own(case)[0].item() > 15


def test_backward_twice_gives_the_same_gradient() -> None:
    logits, logps, ids, _ = all_cases()["top 17"]
    logits.requires_grad_()
    loss, _ = forward_kl(logits, logps, ids, vocab_size=V)
    first = torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(loss.sum(), logits)[0], first)


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits, *rest = all_cases()["top 17"]
    loss, grad = own((logits.bfloat16(), *rest))
    want_loss, want_grad = own((logits.bfloat16().float(), *rest))
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    assert torch.equal(loss, want_loss) and torch.equal(grad, want_grad.bfloat16())


def test_chunks_of_positions_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = all_cases()["top 17"]
    whole = own(case)
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", 2 * PADDED)
    chunked = own(case)
    assert torch.equal(chunked[0], whole[0]) and torch.equal(chunked[1], whole[1])


def test_diagnostics_are_the_masses_of_the_support() -> None:
    logits, logps, ids, _ = all_cases()["top 17"]
    _, diagnostics = forward_kl(logits, logps, ids, vocab_size=V)
    student = logits[:, :V].double().softmax(1).gather(1, ids).sum(1)
    torch.testing.assert_close(diagnostics["teacher_topk_mass"], logps.double().exp().sum(1))
    torch.testing.assert_close(diagnostics["student_topk_mass"].double(), student)
