"""Fixtures of the loss tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests._support.worker_pool import WorkerPool


@pytest.fixture(scope="package")
def pool() -> Iterator[WorkerPool]:
    """Processes of tensor-parallel groups."""
    pool = WorkerPool()
    yield pool
    pool.close()
