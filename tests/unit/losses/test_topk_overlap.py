"""Overlap of the teacher's and the student's top-k against Python sets; entropy of buckets."""

from __future__ import annotations

import pytest
import torch

from recipe_gkd.losses.diagnostics import entropy, topk_overlap
from recipe_gkd.losses.distributions import valid_entries
from tests._support.loss_cases import VOCABULARY
from tests._support.topk_overlap_cases import SIZES, overlap_case, overlap_of_sets


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
