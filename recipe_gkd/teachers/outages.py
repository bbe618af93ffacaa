"""Warnings about a teacher service without workers, or out of reach, while requests wait for it.

States of a service and their transitions::

    available  -> outage      a status reports no worker, or cannot be delivered: one warning
    outage     -> available   a status reports workers, or a request gets its result: one message

Only a request that waits triggers a status request. A late status changes nothing: the connection may be busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.schema import TeacherConfig
from recipe_gkd.runtime.clock import now
from teacher import ServiceStatus
from teacher.client import TeacherClient
from teacher.errors import TeacherError, TeacherUnavailable

log = logging.getLogger(__name__)

FIRST_CHECK_S = 2.0  # time without a result after which the service is checked
CHECK_EVERY_S = 5.0
STATUS_TIMEOUT_S = 3.0  # a reachable service replies in milliseconds, unless results fill the connection

R = TypeVar("R")


class OutageMonitor:
    """Monitor of the teacher services for which requests wait.

    Teachers with the same client are one service.
    """

    def __init__(self, clients: Mapping[str, TeacherClient], config: TeacherConfig) -> None:
        """Create a monitor without outages.

        Args:
            clients: Client of each teacher, by name.
            config: Failure settings, for the messages.
        """
        self._clients, self._config = clients, config
        self._next_check: dict[TeacherClient, float] = {}
        self._outage_began: dict[TeacherClient, float] = {}
        self._last_recovery: dict[TeacherClient, float] = {}

    async def result_of(self, teacher: str, request: Awaitable[R]) -> R:
        """Return the result of a request, and check the service while there is none.

        Canceling the awaiting task cancels the request.

        Args:
            request: Awaitable of its result.

        Raises:
            TeacherError: The request failed.
        """
        result = asyncio.ensure_future(request)
        try:
            pause_s = FIRST_CHECK_S
            while not (await asyncio.wait([result], timeout=pause_s))[0]:
                await self._check(teacher, result)
                pause_s = CHECK_EVERY_S
            value = result.result()
        finally:
            result.cancel()  # without effect if it is done
        self._note_recovery(teacher, "answers")
        return value

    async def _check(self, teacher: str, result: asyncio.Future[R]) -> None:
        """Request the status, at most once per interval and service. Return early if ``result`` is done."""
        client = self._clients[teacher]
        if now() < self._next_check.get(client, 0.0):
            return
        requested = now()
        self._next_check[client] = requested + CHECK_EVERY_S
        status = asyncio.wrap_future(client.submit_status(STATUS_TIMEOUT_S))
        try:
            either: set[asyncio.Future[Any]] = {result, status}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not status.done() or requested < self._last_recovery.get(client, 0.0):
                return  # A status from before the last recovery is out of date.
            self._note_status(teacher, status.result())
        except TeacherUnavailable as error:
            self._note_outage(teacher, f"cannot be reached: {error}")
        except TeacherError as error:
            log.debug("no status of teacher %s: %s", teacher, error)
        finally:
            status.cancel()

    def _note_status(self, teacher: str, status: ServiceStatus) -> None:
        if status.workers:
            self._note_recovery(teacher, f"has {len(status.workers)} workers")
        else:
            hint = "add one with teacher/join_server.sh"
            self._note_outage(teacher, f"has no worker (last removal: {status.last_removal}): {hint}")

    def _note_outage(self, teacher: str, problem: str) -> None:
        client = self._clients[teacher]
        if client in self._outage_began:
            return
        self._outage_began[client] = now()
        config = self._config
        limit = (
            f"max_wait_s={config.max_wait_s:g}" if config.on_failure == "wait" else f"timeout_s={config.timeout_s:g}"
        )
        log.warning(
            "teacher %s at %s %s. Requests wait for at most %s.%s seconds, then on_failure=%s applies",
            teacher, client.address, problem, TEACHER, limit, config.on_failure,
        )  # fmt: skip

    def _note_recovery(self, teacher: str, state: str) -> None:
        client = self._clients[teacher]
        if (began := self._outage_began.pop(client, None)) is not None:
            self._last_recovery[client] = now()
            log.warning("teacher %s at %s %s again, after %.0f s", teacher, client.address, state, now() - began)
