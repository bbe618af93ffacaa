"""Rows of a sample from the teacher's top k and from support ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe_gkd.teachers.scoring import support
from recipe_gkd.teachers.scoring.support import rows_of
from teacher.records import ScoredSequence, TeacherSequence

N_IDS = 12


def scored(logps_TV: np.ndarray, sequence: TeacherSequence, k: int) -> ScoredSequence:
    """Return a teacher's scores of a sequence, from its log-probabilities of all ids."""
    order_TK = np.argsort(-logps_TV, axis=1)[:, :k].astype(np.int32)
    support_TJ = sequence.support_ids_TJ
    return ScoredSequence(
        np.take_along_axis(logps_TV, order_TK, 1),
        order_TK,
        np.zeros(len(logps_TV), np.float32),
        None if support_TJ is None else np.take_along_axis(logps_TV, np.maximum(support_TJ, 0), 1),
    )


class TestRowsOf:
    @given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, N_IDS), st.integers(0, N_IDS))
    def test_each_id_of_both_occurs_once_with_its_log_probability(self, seed: int, t: int, j: int, k: int) -> None:
        rng = np.random.default_rng(seed)
        logps_TV = np.log(rng.dirichlet(np.ones(N_IDS), t)).astype(np.float32).reshape(t, N_IDS)
        ids_TJ = np.array([rng.permutation(N_IDS)[:j] for _ in range(t)], np.int32).reshape(t, j)
        sequence = TeacherSequence(np.zeros(1 + t, np.int32), 1, support_ids_TJ=ids_TJ, with_top_k=k > 0)
        top = scored(logps_TV, sequence, k)
        logps_TK, ids_TK = rows_of(sequence, top)
        assert logps_TK.shape == ids_TK.shape == (t, k + j) and ids_TK.dtype == np.int32
        for row in range(t):
            used = ids_TK[row] >= 0
            assert sorted(ids_TK[row, used]) == sorted({*top.topk_ids_TK[row], *ids_TJ[row]})
            np.testing.assert_array_equal(logps_TK[row, used], logps_TV[row, ids_TK[row, used]])
            assert (logps_TK[row, ~used] == -np.inf).all()

    def test_large_responses_are_compared_in_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(0)
        logps_TV = np.log(rng.dirichlet(np.ones(N_IDS), 9)).astype(np.float32)
        ids_TJ = np.array([rng.permutation(N_IDS)[:3] for _ in range(9)], np.int32)
        sequence = TeacherSequence(np.zeros(10, np.int32), 1, support_ids_TJ=ids_TJ)
        whole = rows_of(sequence, scored(logps_TV, sequence, 4))
        monkeypatch.setattr(support, "_BLOCK_ELEMENTS", 24)  # two rows
        for got, expected in zip(rows_of(sequence, scored(logps_TV, sequence, 4)), whole, strict=True):
            np.testing.assert_array_equal(got, expected)

    def test_without_support_ids_arrays_are_not_copied(self) -> None:
        sequence = TeacherSequence(np.zeros(3, np.int32), 1)
        top = scored(np.zeros((2, N_IDS), np.float32), sequence, 4)
        logps_TK, ids_TK = rows_of(sequence, top)
        assert logps_TK is top.topk_logps_TK and ids_TK is top.topk_ids_TK

    def test_float16_log_probabilities_keep_their_type(self) -> None:
        ids_TJ = np.array([[3, 0]], np.int32)
        sequence = TeacherSequence(np.zeros(2, np.int32), 1, support_ids_TJ=ids_TJ)
        top = scored(np.log(np.arange(1, 1 + N_IDS)[None] / 78).astype(np.float16), sequence, 2)
        assert rows_of(sequence, top)[0].dtype == np.float16
