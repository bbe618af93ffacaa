"""Warnings about a teacher service that has no worker, or cannot be reached, while requests to it wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from recipe_gkd.config.schema import TeacherConfig
from recipe_gkd.config.teachers import TEACHER
from recipe_gkd.runtime.clock import now
from teacher.client import TeacherClient
from teacher.errors import TeacherError, TeacherUnavailable
from teacher.status import ServiceStatus

log = logging.getLogger(__name__)

FIRST_CHECK_S = 2.0
"""Time after which a request without an answer makes the service be checked, in seconds."""
CHECK_EVERY_S = 5.0
STATUS_TIMEOUT_S = 3.0
"""Deadline of a status request. A reachable service answers in milliseconds, unless answers fill the connection."""

R = TypeVar("R")


class OutageMonitor:
    """Monitor of the services for which requests wait, by their status.

    Logs one warning per outage and service, and one line when the outage is over. Two teachers of one address are one
    service. A status that is late is no outage: the connection may be busy with answers.
    """

    def __init__(self, clients: Mapping[str, TeacherClient], config: TeacherConfig) -> None:
        """Create a monitor without outages. ``clients``: by the teacher's name."""
        self._clients, self._config = clients, config
        self._next_check: dict[TeacherClient, float] = {}
        self._began: dict[TeacherClient, float] = {}
        """Time at which each present outage was noticed."""

    async def result_of(self, teacher: str, request: Future[R]) -> R:
        """Return or raise what ``request`` does; check the service while it has no result. Cancels it if canceled."""
        result = asyncio.wrap_future(request)
        try:
            pause_s = FIRST_CHECK_S
            while not (await asyncio.wait([result], timeout=pause_s))[0]:
                await self._check(teacher, result)
                pause_s = CHECK_EVERY_S
            response = result.result()
        finally:
            result.cancel()  # without effect if it is done
        self._note_recovery(teacher, "answers")
        return response

    async def _check(self, teacher: str, result: asyncio.Future[R]) -> None:
        """Request the status, however many requests wait, once in ``CHECK_EVERY_S``. Ends early with ``result``."""
        client = self._clients[teacher]
        if now() < self._next_check.get(client, 0.0):
            return
        self._next_check[client] = now() + CHECK_EVERY_S
        status = asyncio.wrap_future(client.submit_status(STATUS_TIMEOUT_S))
        try:
            either: set[asyncio.Future[Any]] = {result, status}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not status.done():
                return
            self._note(teacher, status.result())
        except TeacherUnavailable as error:
            self._note_outage(teacher, f"cannot be reached: {error}")
        except TeacherError as error:
            log.debug("no status of teacher %s: %s", teacher, error)
        finally:
            status.cancel()

    def _note(self, teacher: str, status: ServiceStatus) -> None:
        if status.workers:
            self._note_recovery(teacher, f"has {len(status.workers)} workers")
        else:
            self._note_outage(teacher, f"has no worker ({status.last_loss}): add one with teacher/join_server.sh")

    def _note_outage(self, teacher: str, what: str) -> None:
        client = self._clients[teacher]
        if client in self._began:
            return
        self._began[client] = now()
        config = self._config
        limit = (
            f"max_wait_s={config.max_wait_s:g}" if config.on_failure == "wait" else f"timeout_s={config.timeout_s:g}"
        )
        log.warning(
            "teacher %s at %s %s. Requests wait for it, for %s.%s seconds at most, then on_failure=%s decides",
            teacher, client.address, what, TEACHER, limit, config.on_failure,
        )  # fmt: skip

    def _note_recovery(self, teacher: str, what: str) -> None:
        client = self._clients[teacher]
        if (began := self._began.pop(client, None)) is not None:
            log.warning("teacher %s at %s %s again, after %.0f s", teacher, client.address, what, now() - began)
