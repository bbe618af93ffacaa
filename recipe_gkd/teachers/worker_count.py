"""Number of teacher workers of a run, from the configuration or from the teacher services."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from recipe_gkd.config import Config
from recipe_gkd.config.keys import TEACHER
from recipe_gkd.teachers.backends import TeacherBackend, hello_now
from recipe_gkd.teachers.scoring.clients import RemoteBackend

log = logging.getLogger(__name__)


def with_worker_count(config: Config, clients: Mapping[str, TeacherBackend]) -> Config:
    """Return the configuration with ``n_server_workers`` set.

    None becomes the number of workers that the services have now, or of HTTP servers, or 1 without a service. A number
    is kept, and a warning is logged if the services have another one.

    Raises:
        TeacherError: A service cannot be reached, or has no worker in time; see `hello_now`.
    """
    settings = config.actor_rollout_ref
    configured = settings.teacher.n_server_workers
    services = {client.address: client for client in clients.values() if isinstance(client, RemoteBackend)}
    counts = {address: hello_now(client, config).n_workers for address, client in services.items()}
    found = sum(counts.values())
    if counts:
        listed = ", ".join(f"{n} at {address}" for address, n in counts.items())
        if configured is None:
            log.info("teacher workers: %d (%s)", found, listed)
        elif configured != found:
            log.warning(
                "%s.n_server_workers=%d, but the teacher services have %d workers (%s); the run uses %d. Start or stop "
                "workers, or set it to null for the number at the start of the run",
                *(TEACHER, configured, found, listed, configured),
            )
    teacher = replace(settings.teacher, n_server_workers=configured or found or 1)
    return replace(config, actor_rollout_ref=replace(settings, teacher=teacher))
