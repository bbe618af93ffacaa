"""Tests of checksums of tensors: which changes they find."""

from __future__ import annotations

import pytest
import torch

from teacher.common import tensor_checksum
from teacher.common.tensor_checksum import tensor_checksums


def checksum(tensor: torch.Tensor) -> int:
    return tensor_checksums({"x": tensor})["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (64, 33)])
def test_checksum_changes_with_each_value_and_with_the_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = (torch.arange(torch.Size(shape).numel()) % 100 + 1).float().view(shape)
    before = checksum(values.to(dtype))
    assert checksum(values.to(dtype)) == before
    for index in {0, values.numel() // 2, values.numel() - 1}:
        changed = values.clone()
        changed.view(-1)[index] += 2 if dtype != torch.float8_e4m3fn else 16
        assert checksum(changed.to(dtype)) != before
    if values.numel() > 1:
        assert checksum(values.flip(0).to(dtype)) != before


def test_checksum_does_not_depend_on_chunks_or_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50, 41, generator=torch.Generator().manual_seed(0))
    before = checksum(values)
    assert checksum(values.t().contiguous().t()) == before
    monkeypatch.setattr(tensor_checksum, "_CHUNK_WORDS", 64)
    assert checksum(values) == before
    assert checksum(torch.cat([values[32:], values[:32]])) != before


def test_checksums_of_empty_and_scalar_tensors() -> None:
    found = tensor_checksums({"empty": torch.empty(0, 3), "scalar": torch.tensor(1.0), "odd": torch.ones(5)[1:]})
    assert found["empty"] == 0 and found["scalar"] != 0 and list(found) == ["empty", "scalar", "odd"]
    assert tensor_checksums({}) == {}
