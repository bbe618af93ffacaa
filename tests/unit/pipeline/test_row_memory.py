"""Limit of the teachers' rows: which batches count, and how much."""

from __future__ import annotations

from recipe_gkd.pipeline.row_memory import RowMemory


def memory_with(limit_bytes: int | None, *complete: int) -> RowMemory:
    """Return the memory with complete batches of these sizes, from step 0 on."""
    rows = RowMemory(limit_bytes)
    for step, n_bytes in enumerate(complete):
        rows.begin(step)
        rows.add(step, n_bytes)
        rows.complete(step)
    return rows


class TestHasRoom:
    def test_one_batch_is_always_allowed_but_not_two_of_unknown_size(self) -> None:
        rows = RowMemory(1)
        assert rows.has_room()
        rows.begin(0)
        assert not rows.has_room() and RowMemory(None).has_room()

    def test_complete_batch_counts_with_its_size(self) -> None:
        rows = memory_with(10, 6, 2)
        rows.release(0)
        assert rows.held_bytes == 2 and rows.has_room()  # 2 + 6, although one batch had 6

    def test_incomplete_batch_counts_with_the_largest_size(self) -> None:
        rows = memory_with(10, 6, 2)
        rows.release(0)
        rows.begin(2)
        assert not rows.has_room()  # 2 + 6 + 6
        rows.release(1)
        assert not rows.has_room()  # 6 + 6
        rows.add(2, 1)
        rows.complete(2)
        assert rows.has_room()  # 1 + 6

    def test_incomplete_batch_that_is_the_largest_counts_with_its_rows(self) -> None:
        rows = memory_with(10, 2)
        rows.release(0)
        rows.begin(1)
        rows.add(1, 9)
        assert not rows.has_room()  # 9 + 2
