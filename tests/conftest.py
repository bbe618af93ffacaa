"""Fixtures that several rooms share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._support.repository import REPO
from tests._support.teacher_service import make_tiny_qwen2

# Processes that tests start, Ray workers among them, import helpers and worker classes of ``tests``.
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


LONGEST_FIRST = ("training", "faults", "actor", "rollout", "ray_cluster", "teacher")
"""Folders of ``tests/integration`` that take longest. They start first, so that all processes end at the same time."""


def group_of(nodeid: str) -> str:
    """Return the part of the suite that one process runs: a file of unit tests, or a folder of integration tests."""
    file = nodeid.partition("::")[0]
    return str(Path(file).parent) if "integration" in Path(file).parts else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest folders first in the processes of ``pytest -n``."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = {folder: place for place, folder in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: order.get(Path(group_of(item.nodeid)).name, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each group of tests in one process of ``pytest -n``: the tests of a folder share engines and services.

    Not by ``--dist loadgroup``: xdist 3.8 passes groups in an attribute that pytest 9.2 no longer has.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(scope="session", autouse=True)
def default_sigint() -> None:
    """Deliver SIGINT to the programs that tests start, even if this process is a background job that ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that teacher tests serve."""
    return make_tiny_qwen2(tmp_path_factory.mktemp("tiny_qwen2"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray cluster for all tests of this process, with more CPU slots than the machine has cores."""
    import ray

    from recipe_gkd.ray_cluster.connection import start_local_cluster

    start_local_cluster(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
