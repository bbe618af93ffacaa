"""Free memory of a GPU."""

from __future__ import annotations

from teacher.common.cuda_memory import reusable_bytes


def test_free_blocks_of_private_pools_do_not_count() -> None:
    segments = [
        {"total_size": 100, "active_size": 30, "segment_pool_id": (0, 0)},
        {"total_size": 1000, "active_size": 0, "segment_pool_id": (0, 1)},  # of CUDA graphs
        {"total_size": 10, "active_size": 10, "segment_pool_id": [0, 0]},
    ]
    assert reusable_bytes(segments) == 70
