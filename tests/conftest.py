"""Shared fixtures, and the distribution of tests over the processes of ``pytest -n``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from recipe_gkd.config import compose
from recipe_gkd.runtime.worker_variables import RES_OPTIONS
from tests._support.composition import compose_from_cache
from tests._support.repository import REPO
from tests._support.teacher_service import make_tiny_qwen2

# Ray workers and other processes of tests import helpers and worker classes from ``tests``.
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("PYTHON", None)  # interpreter of the set-up, which scripts under test would run instead of a stub
# Without it torch.cuda.is_available() initializes CUDA, and processes that are forked later cannot use the GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("RES_OPTIONS", RES_OPTIONS)
compose.compose_accepted = compose_from_cache  # some modules load a configuration when they are imported
hypothesis.settings.register_profile("tests", deadline=None)  # an example may be slow on a busy machine
hypothesis.settings.load_profile("tests")

LONGEST_FIRST = (
    "training",
    "faults",
    "actor",
    "rollout",
    "ray_cluster",
    "integration/teacher",
    "test_triton_tensor_parallel",
    "test_triton_compilation",
    "test_triton_real_sizes",
)
"""Groups by decreasing duration. They start in this order to balance the processes."""


def group_of(nodeid: str) -> str:
    """Return the file of a unit test, or the folder of another test. One process runs all tests of a group."""
    file = nodeid.partition("::")[0]
    return str(Path(file).parent) if {"integration", "gpu_paths"} & set(Path(file).parts) else file


def start_order(group: str) -> int:
    """Return the position of a group in ``LONGEST_FIRST``, and its length for other groups."""
    path = Path(group).with_suffix("").as_posix()
    return next((i for i, name in enumerate(LONGEST_FIRST) if path.endswith(f"/{name}")), len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests for ``pytest -n``: the longest folders first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: start_order(group_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that runs each group in one process, because the tests of a folder share engines and services.

    ``--dist loadgroup`` does not work: xdist 3.8 passes groups in an attribute that pytest 9.2 no longer has.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(scope="session", autouse=True)
def default_sigint() -> None:
    """Enable SIGINT in this process. A background job ignores it, and the programs that it starts would, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny teacher model with 96 tokens."""
    return make_tiny_qwen2(tmp_path_factory.mktemp("tiny_qwen2"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Local Ray cluster for all tests of this process. It has 8 CPU slots on any machine."""
    import ray

    from recipe_gkd.ray_cluster.connection import start_local_cluster

    start_local_cluster(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
