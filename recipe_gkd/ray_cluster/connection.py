"""Connection of the driver to Ray: a local cluster that it starts, or an existing cluster."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.exceptions import RayError

from recipe_gkd.config.schema import Config
from recipe_gkd.config.startup import DEFAULT_STARTUP_TIMEOUT_S, startup_timeout_s
from recipe_gkd.errors import ResourceError
from recipe_gkd.runtime.after_exit import kill_after_this_process
from recipe_gkd.runtime.keyed_timeout import raise_hint
from recipe_gkd.runtime.process_trees import kill_trees, tree
from recipe_gkd.runtime.socket_paths import shorten_socket_paths
from recipe_gkd.runtime.wait_log import waiting_for
from recipe_gkd.runtime.worker_variables import RES_OPTIONS
from teacher.common.process_id import ProcessId

log = logging.getLogger(__name__)

RAY_START_TIMEOUT_S = 30
"""Time that Ray gives each attempt to start a local cluster. It cannot be configured."""
_KILL_TIMEOUT_S = 10.0
_START_TIMED_OUT = "timed out during startup"


@contextmanager
def connected_cluster(config: Config) -> Iterator[None]:
    """Connect to the cluster of ``ray_init``, and disconnect on exit.

    Without ``ray_init.address``, start a cluster on this machine; it ends on exit, with all its processes.
    The timeline of ``ray_init.timeline_json_file`` is written after a failed run too.

    Raises:
        ResourceError: Ray could not connect or start.
    """
    settings = config.ray_init
    timeout_s = startup_timeout_s(config, "cuda" if config.trainer.device == "cuda" else "cpu")
    # The default of a future Ray version. It suppresses a warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RES_OPTIONS", RES_OPTIONS)
    if not settings.timeline_json_file:
        # The control service keeps records of 100,000 calls by default, each of 3 kB.
        os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "10000")
    try:
        if settings.address:
            with waiting_for("start, connect to Ray", None, f"the cluster at {settings.address}"):
                ray.init(address=settings.address, logging_level=logging.ERROR)
        else:
            for change in shorten_socket_paths(os.environ):
                log.warning("%s", change)
            start_local_cluster(num_cpus=settings.num_cpus, include_dashboard=False, timeout_s=timeout_s)
    except ResourceError:
        raise
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        if not settings.address:
            raise ResourceError(
                f"Ray could not start a cluster on this machine: {error}", remedy=f"read the logs in {_latest_logs()}"
            ) from error
        raise ResourceError(
            f"Ray could not connect to the cluster at ray_init.address={settings.address}: {error}",
            node=settings.address,
            remedy="check `ray status`, or set ray_init.address=null to start a cluster on this machine",
        ) from error
    try:
        yield
    finally:
        if settings.timeline_json_file:
            _write_timeline(settings.timeline_json_file)
        ray.shutdown()


def start_local_cluster(*, timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S["cpu"], **settings: Any) -> None:
    """Start a Ray cluster on this machine that ends with this process, and connect to it.

    A raylet gives its agents 15 s to start, and exits if a busy machine needs longer. Ray reports that as a bare
    ``Exception`` 30 s later, and neither time can be configured (ray-project/ray#65983). Therefore the start is
    repeated until the deadline.

    Args:
        timeout_s: Time after which no further attempt is made.
        **settings: Arguments of ``ray.init``, except ``address`` and ``logging_level``.

    Raises:
        ResourceError: No attempt succeeded before the deadline.
        ConnectionError, OSError, RuntimeError, ValueError: Errors of ``ray.init``.
    """
    # Ray would start its workers with niceness 15. On a busy machine, the teacher and all other programs would then get
    # thirty times their share of a core: a run of 60 s alone took 430 s in the parallel test suite.
    os.environ.setdefault("RAY_worker_niceness", "0")
    before, started = set(_descendants()), time.monotonic()
    for attempt in itertools.count(1):
        try:
            with waiting_for("start, Ray", timeout_s, f"Ray's processes on this machine (attempt {attempt})"):
                # Without an address, ray.init would join any cluster that it finds on this machine.
                context: Any = ray.init(address="local", logging_level=logging.ERROR, **settings)
            break
        except Exception as error:
            if _START_TIMED_OUT not in str(error):
                raise
            kill_trees([process for process in _descendants() if process not in before], _KILL_TIMEOUT_S)
            logs, elapsed_s = _latest_logs(), time.monotonic() - started
            if elapsed_s >= timeout_s:
                raise ResourceError(
                    f"Ray did not start on this machine within {timeout_s:g} s, in {attempt} attempts of "
                    f"{RAY_START_TIMEOUT_S} s. The machine may be too busy, or out of memory or disk space",
                    waited_s=timeout_s,
                    remedy=f"read raylet.err and dashboard_agent.log in {logs}, "
                    f"{raise_hint(timeout_s, 'use a longer deadline')}, or start Ray with `ray start --head` and set "
                    "ray_init.address=auto",
                ) from error
            log.warning(
                "Ray did not start within %d s (logs: %s); trying again until %g s have passed",
                RAY_START_TIMEOUT_S, logs, timeout_s,
            )  # fmt: skip
    # After the driver is killed, Ray's agents would report that for 60 s to a service that has ended with the driver
    # (ray/_private/utils.py, publish_error_to_driver). A worker that was about to start would wait as long.
    session = Path(context.address_info["session_dir"]).name
    kill_after_this_process(
        (process for process in _descendants() if process not in before), argument=f"--session-name={session}"
    )


def choose_device(requested: str) -> str:
    """Return the device kind of all workers. No other code selects it.

    Args:
        requested: ``trainer.device``: ``"auto"``, ``"cuda"`` or ``"cpu"``.

    Returns:
        ``"cuda"`` or ``"cpu"``.

    Raises:
        ResourceError: ``"cuda"`` is requested, but the cluster has no GPU.
    """
    n_gpus = ray.cluster_resources().get("GPU", 0)
    if requested == "auto":
        return "cuda" if n_gpus else "cpu"
    if requested == "cuda" and not n_gpus:
        raise ResourceError(
            "trainer.device=cuda, but the Ray cluster has no GPU",
            remedy="set trainer.device=cpu or auto, or start Ray on machines with GPUs",
        )
    return requested


def _latest_logs() -> Path:
    """Return the logs of the cluster that this machine started last."""
    return Path(get_default_ray_temp_dir()) / "session_latest" / "logs"


def _descendants() -> list[ProcessId]:
    return [process for process in tree([os.getpid()]) if process.pid != os.getpid()]


def _write_timeline(path: str) -> None:
    try:
        ray.timeline(filename=path)
    except (OSError, RayError) as error:
        log.warning("ray_init.timeline_json_file=%s could not be written: %s", path, error)
