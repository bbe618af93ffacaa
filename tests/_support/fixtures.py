"""Fixtures that folders of unit tests and of integration tests share. A conftest.py imports those that it needs."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests._support.worker_pool import WorkerPool


@pytest.fixture(scope="package")
def pool() -> Iterator[WorkerPool]:
    """Processes of tensor-parallel groups."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_reward_process_remains() -> Iterator[None]:
    """Fail a test that leaves a process of a reward function running."""
    yield
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if any("rewards/child.py" in word for word in child.cmdline())]
