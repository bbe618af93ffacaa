"""Overlap of the teacher's and the student's top-k against Python sets; entropy of buckets."""

from __future__ import annotations

import math

import pytest
import torch

from recipe_gkd.losses.diagnostics import entropy, topk_overlap
from recipe_gkd.losses.distributions import valid_entries
from tests.unit.losses.cases import VOCABULARY, Case, make_case

SIZES = (1, 2, 17, 50, VOCABULARY)


def overlap_case(k: int) -> Case:
    """Return a teacher and a student with ids in common. The padding has the largest logits."""
    case, generator = make_case(k, 1.0), torch.Generator().manual_seed(5)
    logits = torch.randn(case.logits_TW.shape, generator=generator)  # without ties
    logits.scatter_add_(1, case.ids_TK.clamp(0, VOCABULARY - 1), torch.rand(case.ids_TK.shape, generator=generator) * 2)
    logits[:, VOCABULARY:] = 50.0
    return Case(logits_TW=logits, logps_TK=case.logps_TK, ids_TK=case.ids_TK)


def overlap_of_sets(case: Case) -> list[float]:
    fractions = []
    for logits_V, logps_K, ids_K in zip(case.logits_TW[:, :VOCABULARY], case.logps_TK, case.ids_TK, strict=True):
        entries = zip(ids_K.tolist(), logps_K.tolist(), strict=True)
        teacher = {id for id, logp in entries if 0 <= id < VOCABULARY and logp > -math.inf}
        student = set(sorted(range(VOCABULARY), key=lambda id: -logits_V[id].item())[: len(teacher)])
        fractions.append(len(teacher & student) / len(teacher) if teacher else math.nan)
    return fractions


def test_topk_overlap_equals_sets() -> None:
    for k in SIZES:
        case = overlap_case(k)
        valid = valid_entries(case.logps_TK, case.ids_TK, VOCABULARY)
        got = topk_overlap(case.logits_TW, case.ids_TK, valid, vocab_size=VOCABULARY)
        assert got.tolist() == pytest.approx(overlap_of_sets(case), nan_ok=True), k
        assert k == 1 or ((got > 0) & (got < 1)).any(), "every overlap is 0 or 1"


def test_topk_overlap_of_no_positions_is_empty() -> None:
    empty = torch.zeros(0, 3, dtype=torch.int64)
    assert topk_overlap(torch.zeros(0, 8), empty, empty.bool(), vocab_size=7).shape == (0,)


def test_entropy_of_buckets_is_at_most_whole_entropy() -> None:
    p = (2 * torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).softmax(1)
    whole = torch.distributions.Categorical(probs=p).entropy()
    torch.testing.assert_close(entropy(p), whole)
    assert (entropy(torch.cat([p[:, :5], p[:, 5:].sum(1, keepdim=True)], dim=1)) <= whole).all()
    assert entropy(torch.tensor([[1.0, 0.0]])).item() == 0
