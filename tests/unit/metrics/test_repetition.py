"""Repetition in responses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe_gkd.data.samples import Response
from recipe_gkd.metrics.repetition import repeated_share, repetition_metrics


def response(ids: list[int], finish_reason: str) -> Response:
    n = len(ids)
    return Response(
        uid=0, ids=np.array(ids, np.int32), logprobs=np.zeros(n, np.float32), finish_reason=finish_reason,
        weights_version=0, versions_T=np.zeros(n, np.int32),
    )  # fmt: skip


class TestRepeatedShare:
    @given(
        st.one_of(
            st.lists(st.integers(0, 3), max_size=60),
            st.lists(st.sampled_from([0, 2**31 - 1, 151_643, 65_536]), max_size=60),
            st.lists(st.integers(0, 2**31 - 1), max_size=30).map(lambda ids: ids * 3),
        )
    )
    def test_equals_the_share_of_sets_of_tuples(self, ids: list[int]) -> None:
        grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        expected = 1 - len(set(grams)) / len(grams) if len(ids) > 4 else 0.0
        assert repeated_share(np.array(ids, np.int32)) == pytest.approx(expected, abs=1e-12)

    def test_longest_responses_are_counted_exactly(self) -> None:
        ids = np.arange(70_000, dtype=np.int32)
        assert repeated_share(ids) == 0.0
        assert repeated_share(np.tile(ids[:65_536], 2)) == pytest.approx(1 - 65_536 / (2 * 65_536 - 3))


class TestRepetitionMetrics:
    def test_truncated_loops_are_counted(self) -> None:
        responses = [
            response([7] * 100, "length"),
            response([7] * 100, "stop"),  # repeats itself, and ends
            response(list(range(100)), "length"),  # is only long
            response([], "stop"),
        ]
        metrics = repetition_metrics(responses, "response/")
        assert metrics["response/looping_fraction"] == 0.25
        assert metrics["response/seq_rep_4"] == pytest.approx(2 * (96 / 97) / 4)
