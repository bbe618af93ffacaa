from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests._support.worker_pool import WorkerPool


@pytest.fixture(scope="package")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()
