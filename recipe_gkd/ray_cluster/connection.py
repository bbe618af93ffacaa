"""Ray: a cluster of its own on this machine, or one that is already there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.exceptions import RayError

from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ResourceError
from recipe_gkd.runtime.after_exit import kill_after_this_process
from recipe_gkd.runtime.process_id import ProcessId
from recipe_gkd.runtime.process_trees import end_trees, tree

log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""Attempts to start a local cluster, each of which Ray gives 30 s."""
_END_TIMEOUT_S = 10.0
_START_TIMED_OUT = "timed out during startup"


@contextmanager
def ray_cluster(config: Config) -> Iterator[None]:
    """Connect, and at the end disconnect; a local cluster ends with it, with all its processes."""
    settings = config.ray_init
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the future default; silences a warning
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if settings.address:
            ray.init(address=settings.address, logging_level=logging.ERROR)
        else:
            start_local_cluster(num_cpus=settings.num_cpus, include_dashboard=False)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at ray_init.address={settings.address}" if settings.address else "a local cluster"
        raise ResourceError(
            f"Ray could not connect to {where}: {error}; see `ray status`, or set ray_init.address=null "
            "to start one on this machine"
        ) from error
    try:
        yield
    finally:  # also of a run that failed: what happened in it is then of interest
        if settings.timeline_json_file:
            _write_timeline(settings.timeline_json_file)
        ray.shutdown()


def start_local_cluster(**settings: Any) -> None:
    """Start a Ray cluster on this machine that ends with this process, and connect to it.

    A raylet gives its agents 15 s to start, and ends if a busy machine needs longer. Ray reports that as a bare
    ``Exception`` 30 s later, and neither time can be configured (ray-project/ray#65983). So this tries again.

    Args:
        **settings: Arguments of ``ray.init``.

    Raises:
        ResourceError: None of :data:`START_ATTEMPTS` attempts succeeded.
        ConnectionError, OSError, RuntimeError, ValueError: Errors of ``ray.init``.
    """
    before = set(_descendants())
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            # Without an address ray.init would join any cluster that it finds on this machine.
            ray.init(address="local", **{"logging_level": logging.ERROR} | settings)
            break
        except Exception as error:
            if _START_TIMED_OUT not in str(error):
                raise
            end_trees([process for process in _descendants() if process not in before], _END_TIMEOUT_S)
            logs = Path(get_default_ray_temp_dir()) / "session_latest" / "logs"
            if attempt == START_ATTEMPTS:
                raise ResourceError(
                    f"Ray did not start on this machine in {attempt} attempts of 30 s; the machine may be too busy, or "
                    f"out of memory or disk; see raylet.err and dashboard_agent.log in {logs}, or start Ray with "
                    "`ray start --head` and set ray_init.address=auto"
                ) from error
            log.warning("Ray did not start within 30 s (logs: %s); trying again", logs)
    # If the driver is killed, Ray's agents report that for 60 s to a service that has ended with the driver
    # (ray/_private/utils.py, publish_error_to_driver).
    kill_after_this_process(process for process in _descendants() if process not in before)


def _descendants() -> list[ProcessId]:
    return [process for process in tree([os.getpid()]) if process.pid != os.getpid()]


def _write_timeline(path: str) -> None:
    try:
        ray.timeline(filename=path)
    except (OSError, RayError) as error:
        log.warning("ray_init.timeline_json_file=%s could not be written: %s", path, error)


def choose_device(asked: str) -> str:
    """``trainer.device`` resolved: `cuda` or `cpu`. The one place where the device is decided."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if asked == "auto":
        return "cuda" if gpus else "cpu"
    if asked == "cuda" and not gpus:
        raise ResourceError(
            "trainer.device=cuda, but the Ray cluster has no GPU; use trainer.device=cpu or auto, or start "
            "Ray where the GPUs are"
        )
    return asked
