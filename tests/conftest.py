"""Fixtures that several rooms share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray cluster for the whole run of the tests, with more CPU slots than the machine has cores."""
    import ray

    here = {"PYTHONPATH": str(Path(__file__).parent)}  # worker classes that a test module defines
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": here},
    )
    yield
    ray.shutdown()
