from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests._support.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Processes of the ranks of actors."""
    pool = WorkerPool()
    yield pool
    pool.close()
