"""Tests of the bucket layout, of packing, and of checksums."""

from __future__ import annotations

import pytest
import torch

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import (
    ALIGNMENT_BYTES,
    BucketPlan,
    Checksum,
    TensorMeta,
    pack,
    plan_buckets,
    unpack,
)
from tests._support.errors import raises

SHAPES = {
    "matrix": ((7, 5), torch.float32),
    "scalar": ((), torch.float32),
    "half": ((3,), torch.bfloat16),
    "empty": ((0, 4), torch.float16),
    "large": ((64, 9), torch.float64),
    "bytes": ((13,), torch.uint8),
    "float8": ((5, 3), torch.float8_e4m3fn),
    "ids": ((11,), torch.int64),
}


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: (100 * torch.rand(shape)).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def meta_of(named: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named.items()]


class TestPlanBuckets:
    @pytest.mark.parametrize("bucket_bytes", [1, 100, 200, 4096, 1 << 20])
    def test_plan_buckets_are_aligned_and_bounded(self, bucket_bytes: int) -> None:
        for bucket in plan_buckets(meta_of(make_tensors()), bucket_bytes):
            ends = [0]
            for slot in bucket.slots:
                assert slot.offset % ALIGNMENT_BYTES == 0 and ends[-1] <= slot.offset < ends[-1] + ALIGNMENT_BYTES
                ends.append(slot.offset + slot.n_bytes)
            assert bucket.n_bytes % ALIGNMENT_BYTES == 0 and ends[-1] <= bucket.n_bytes < ends[-1] + ALIGNMENT_BYTES
            assert bucket.n_bytes <= bucket_bytes or sum(slot.n_bytes > 0 for slot in bucket.slots) == 1

    def test_plan_extreme_sizes_give_one_tensor_or_one_bucket(self) -> None:
        meta = meta_of(make_tensors())
        single = plan_buckets(meta, 1)
        assert sum(len(bucket.slots) for bucket in single) == len(meta)
        assert all(sum(slot.n_bytes > 0 for slot in bucket.slots) <= 1 for bucket in single)
        assert len(plan_buckets(meta, 1 << 20)) == 1
        assert plan_buckets([], 1 << 20) == []

    def test_plan_large_tensor_gets_own_bucket(self) -> None:
        buckets = plan_buckets(meta_of(make_tensors()), 200)
        large = next(bucket for bucket in buckets if any(slot.name == "large" for slot in bucket.slots))
        assert [slot.name for slot in large.slots if slot.n_bytes] == ["large"] and large.n_bytes == 64 * 9 * 8

    def test_plan_duplicate_name_or_unknown_dtype_raises(self) -> None:
        with raises(WeightSyncError, tensors=("w",)):
            plan_buckets([("w", (1,), "float32"), ("w", (1,), "float32")], 100)
        with raises(WeightSyncError, tensors=("w",)):
            plan_buckets([("w", (1,), "Tensor")], 100)

    def test_fingerprint_depends_on_version_and_plan(self) -> None:
        meta = meta_of(make_tensors())
        assert BucketPlan(meta, 100).fingerprint(1) == BucketPlan([(n, (*s,), d) for n, s, d in meta], 100).fingerprint(
            1
        )
        plans = [BucketPlan(meta, 100), BucketPlan(meta[1:], 100), BucketPlan(meta, 99)]
        assert len({plan.fingerprint(version) for plan in plans for version in (1, 2)}) == 6
        assert (
            plans[0].matches(list(meta), 100) and not plans[0].matches(meta[1:], 100) and not plans[0].matches(meta, 99)
        )


class TestPack:
    @pytest.mark.parametrize("bucket_bytes", [1, 100, 200, 4096, 1 << 20])
    def test_pack_and_unpack_preserve_bits(self, bucket_bytes: int) -> None:
        sent = make_tensors()
        received: dict[str, torch.Tensor] = {}
        export = iter(sent.items())
        for bucket in plan_buckets(meta_of(sent), bucket_bytes):
            buffer = torch.full((bucket.n_bytes,), 255, dtype=torch.uint8)
            pack(bucket, export, buffer)
            received.update(unpack(bucket, buffer))
        assert list(received) == list(sent)
        for name, tensor in sent.items():
            assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
            assert torch.equal(received[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))

    def test_pack_different_dtype_or_shape_raises(self) -> None:
        (bucket,) = plan_buckets([("w", (2, 3), "bfloat16")], 100)
        buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8)
        with raises(WeightSyncError, tensors=("w",)):
            pack(bucket, iter([("w", torch.zeros(2, 3))]), buffer)
        with raises(WeightSyncError, tensors=("w",)):
            pack(bucket, iter([("w", torch.zeros(3, 2, dtype=torch.bfloat16))]), buffer)

    def test_pack_non_contiguous_tensor_keeps_values(self) -> None:
        (bucket,) = plan_buckets([("w", (2, 3), "float32")], 100)
        buffer = torch.empty(bucket.n_bytes, dtype=torch.uint8)
        tensor = torch.arange(6.0).view(3, 2).T
        pack(bucket, iter([("w", tensor)]), buffer)
        assert torch.equal(unpack(bucket, buffer)[0][1], tensor)

    def test_pack_into_host_memory_is_complete_when_it_returns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA may return from an asynchronous copy to pageable memory before it is complete."""
        original, seen = torch.Tensor.copy_, []

        def record(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            seen.append(non_blocking)
            return original(self, source, non_blocking=non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", record)
        (bucket,) = plan_buckets([("w", (2, 3), "float32")], 100)
        pack(bucket, iter([("w", torch.ones(2, 3))]), torch.empty(bucket.n_bytes, dtype=torch.uint8))
        assert seen == [False]


class TestChecksum:
    def test_checksum_depends_on_bytes_and_order(self) -> None:
        def value(*buffers: torch.Tensor) -> str:
            checksum = Checksum(torch.device("cpu"))
            for buffer in buffers:
                checksum.add(buffer)
            return checksum.value()

        a, b = torch.randint(0, 255, (2, 64), dtype=torch.uint8)
        changed = b.clone()
        changed[17] ^= 1
        assert value(a, b) == value(a.clone(), b.clone())
        assert len({value(a, b), value(b, a), value(a, changed), value(a), value(a, b, b)}) == 5
