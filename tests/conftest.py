"""Fixtures that several rooms share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


LONGEST_FIRST = ("e2e", "teacher", "rollout", "actor", "faults")
"""Folders that take longest: with several processes they start first, so that the processes end at the same time."""


def folder_of(nodeid: str) -> str:
    """Return the folder under tests/ of a test, or the name of a file that is directly in it."""
    return nodeid.removeprefix("tests/").partition("::")[0].partition("/")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest folders first in the processes of ``pytest -n``."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = {folder: place for place, folder in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: order.get(folder_of(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a folder in one process of ``pytest -n``: they share engines, services and worker processes.

    Not by ``--dist loadgroup``: xdist 3.8 passes groups in an attribute that pytest 9.2 no longer has.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return folder_of(nodeid)

    return ByFolder(config, log)


@pytest.fixture(scope="session", autouse=True)
def default_sigint() -> None:
    """Deliver SIGINT to the programs that tests start, even if this process is a background job that ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray cluster for all tests of this process, with more CPU slots than the machine has cores."""
    import ray

    from recipe_gkd.ray_cluster.connection import start_local_cluster

    here = {"PYTHONPATH": str(Path(__file__).parent)}  # worker classes that a test module defines
    start_local_cluster(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": here},
    )
    yield
    ray.shutdown()
