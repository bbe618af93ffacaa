"""Boxes of a tensor that cover a range of its flattened elements."""

from __future__ import annotations

import math

import pytest
import torch

from recipe_gkd.actor.megatron.optimizer_shards import split_range


class TestSplitRange:
    @pytest.mark.parametrize("shape", [(7,), (5, 3), (3, 2, 4), (1, 6), (4, 1)])
    def test_split_range_every_range_selects_its_elements_in_order(self, shape: tuple[int, ...]) -> None:
        tensor = torch.arange(math.prod(shape)).view(shape)
        for start in range(tensor.numel() + 1):
            for end in range(start, tensor.numel() + 1):
                boxes = split_range(shape, start, end)
                parts = [
                    tensor[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]
                    for offset, size in boxes
                ]
                assert [x for part in parts for x in part.flatten().tolist()] == list(range(start, end))
                assert len(boxes) <= 2 * len(shape) - 1

    def test_split_range_of_matrix_is_rest_of_row_then_rows_then_start_of_row(self) -> None:
        assert split_range((5, 4), 3, 14) == [((0, 3), (1, 1)), ((1, 0), (2, 4)), ((3, 0), (1, 2))]

    def test_split_range_of_complete_tensor_is_one_box(self) -> None:
        assert split_range((5, 4), 0, 20) == [((0, 0), (5, 4))]

    def test_split_range_without_elements_is_empty(self) -> None:
        assert split_range((5, 4), 8, 8) == split_range((5, 4), 8, 4) == []
