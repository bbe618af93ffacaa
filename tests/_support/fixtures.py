"""Fixtures that folders of unit tests and of integration tests share. A conftest.py imports those that it needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import psutil
import pytest

from teacher.proxy import Proxy
from tests._support.teacher_service import running_proxy
from tests._support.worker_pool import WorkerPool


@pytest.fixture(scope="package")
def pool() -> Iterator[WorkerPool]:
    """Processes of tensor-parallel groups."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Proxy of a teacher service in this process."""
    with running_proxy() as running:
        yield running


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the root logger, which commands of the teacher service configure."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def no_reward_process_remains() -> Iterator[None]:
    """Fail a test that leaves a process of a reward function running."""
    yield
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if any("rewards/child.py" in word for word in child.cmdline())]
