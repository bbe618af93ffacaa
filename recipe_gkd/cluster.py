"""Ray: a cluster of its own on this machine, or one that is already there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ResourceError

log = logging.getLogger(__name__)


@contextmanager
def ray_cluster(config: Config) -> Iterator[None]:
    """Connect, and at the end disconnect; a local cluster ends with it, with all its processes."""
    settings = config.ray_init
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the future default; silences a warning
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {} if settings.address else {"num_cpus": settings.num_cpus, "include_dashboard": False}
    try:
        # Without an address ray.init would join any cluster that it finds on this machine.
        ray.init(address=settings.address or "local", logging_level=logging.ERROR, **local)
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
