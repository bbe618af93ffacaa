"""Servers of one teacher: choice of a server for each request, and repetition of requests that failed.

States of a server and their transitions::

    state       | transition
    ------------|---------------------------------------------------------------------------------------------
    unverified  | at the start. A request verifies the server first -> ready
    ready       | gets requests -> paused if one fails; unverified if a connection is lost, or after MAX_IDLE_S
                | without a response, in which another server may have started at the address
    paused      | gets no request for 0.25 s, doubled with each pause in a row to at most 10 s -> ready or unverified
                | at its end, or at the next response of a request that was open

=============================================  ====================================================================
outcome of a request                           reaction
=============================================  ====================================================================
429, 503: the server is full                   repeated until the deadline, at another server or after a wait
connection lost, 502, 504                      repeated until the deadline, at another server if there is one
no response until the deadline                 `TeacherTimeout`; the server is verified before its next request
500                                            repeated, then `TeacherRequestError` at the `MAX_FAULTS`-th time
truncated or invalid JSON                      repeated, then `TeacherUnavailable` at the `MAX_FAULTS`-th time
400 and other refusals                         `TeacherRequestError`
401, 403; 404 for the model                    `TeacherSetupError`; `TeacherChanged`
deadline after failures                        `TeacherUnreachable` if no server could be reached, `TeacherTimeout`
=============================================  ====================================================================
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from teacher.errors import (
    TeacherChanged,
    TeacherError,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherSetupError,
    TeacherTimeout,
    TeacherUnavailable,
    TeacherUnreachable,
    short,
)

R = TypeVar("R")

logger = logging.getLogger(__name__)

MAX_FAULTS = 3
"""Attempts of a request that fails for an unknown reason, which may be the request itself."""
MAX_IDLE_S = 5.0
"""Time without a response after which a server is verified again. No server restarts in a shorter time."""
CONNECT_TIMEOUT_S = 10.0
VERIFY_TIMEOUT_S = 60.0
"""Time limit of a verification, after which another server is tried."""
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 10.0
_FULL = (429, 503)
_GATEWAY = (502, 504)
_KEY = (401, 403)
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class Endpoint:
    """Address of a server.

    Attributes:
        url: Base URL without a trailing slash and ``/v1``, such as ``http://10.0.0.1:8000``.
        api_key: Value of the header ``Authorization: Bearer``. Empty: no header.
    """

    url: str
    api_key: str = field(default="", repr=False)

    @property
    def host(self) -> str:
        """Host name or IP address."""
        return urlsplit(self.url).hostname or ""


@dataclass(eq=False)
class Server:
    """State of one server. See the module for the transitions."""

    endpoint: Endpoint
    is_verified: bool = False
    paused_until: float = 0.0
    last_response: float = 0.0
    n_failures: int = 0
    n_open: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def pause(self) -> None:
        """Send no request for a time, which is longer after each pause without a result in between.

        Failures during a pause are of requests that were open before it, and do not prolong it.
        """
        now = time.monotonic()
        if self.paused_until <= now:
            self.n_failures += 1
            self.paused_until = now + _back_off_s(self.n_failures)

    def resume(self) -> None:
        """End the pause after a result."""
        self.n_failures, self.paused_until = 0, 0.0


def _back_off_s(n_failures: int) -> float:
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(n_failures - 1, 16))


class Refusals:
    """Servers that have refused one request, which may accept others.

    Attributes:
        until: Time of each server until which the request does not go to it.
    """

    def __init__(self) -> None:
        self.until: dict[Server, float] = {}
        self._n_refusals = 0

    def add(self, server: Server, pause_s: float | None = None) -> None:
        """Record a refusal.

        The time has a random part, so that requests that were refused together are not repeated together.

        Args:
            pause_s: Time that the server asks for, in seconds. None: longer after each refusal.
        """
        self._n_refusals += 1
        wait_s = _back_off_s(self._n_refusals) if pause_s is None else max(pause_s, FIRST_PAUSE_S)
        self.until[server] = time.monotonic() + wait_s * random.uniform(1.0, 1.5)


class ConnectionLost(Exception):
    """The server could not be reached, or closed the connection."""


class ServerFull(Exception):
    """The server accepts no request now.

    Args:
        pause_s: Time that it asks for, in seconds. None: unknown.
    """

    def __init__(self, text: str, pause_s: float | None) -> None:
        super().__init__(text)
        self.pause_s = pause_s


class Servers:
    """Servers that serve the same model. Requests go to the one with the fewest open requests.

    Args:
        session: Session of the HTTP client.
        endpoints: Addresses of the servers.
        per_server: Maximum number of open requests at one server.
    """

    def __init__(self, session: aiohttp.ClientSession, endpoints: list[Endpoint], per_server: int) -> None:
        self._session = session
        self.all = [Server(endpoint) for endpoint in endpoints]
        self._per_server, self._released = per_server, asyncio.Event()
        self._free = asyncio.Semaphore(per_server * len(endpoints))

    async def run(
        self,
        send: Callable[[Server], Awaitable[R]],
        verify: Callable[[Server], Awaitable[None]],
        deadline: float,
        timeout_s: float,
    ) -> R:
        """Return the result of a request, which is repeated as the table of the module has it.

        Args:
            send: Function that sends the request to a server.
            verify: Function that verifies a server before it gets requests.
            deadline: End of all attempts, in seconds of ``time.monotonic``.
            timeout_s: The same as a time limit, for messages.

        Raises:
            TeacherError: See the module.
        """
        faults, last, refusals = 0, "", Refusals()
        server: Server | None = None
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())), self._free:
                while True:
                    server = None
                    server = await self._next(refusals)
                    server.n_open += 1
                    try:
                        await ensure_verified(server, verify)
                        result = await send(server)
                        server.resume()
                        return result
                    except ServerFull as full:
                        last = f"{server.endpoint.url}: {full}"
                        refusals.add(server, full.pause_s)
                    except ConnectionLost as lost:
                        last = f"{server.endpoint.url}: {lost}"
                        if server.is_verified or not server.n_failures:
                            logger.warning(
                                "the teacher's server %s: %s; requests are repeated", server.endpoint.url, lost
                            )
                        server.is_verified = False
                        server.pause()
                    except (TeacherProtocolError, ServerFault) as fault:
                        faults, last = faults + 1, f"{server.endpoint.url}: {fault}"
                        if faults >= MAX_FAULTS:
                            raise _as_error(fault, server) from fault
                        server.pause()
                        refusals.add(server)
                    finally:
                        server.n_open -= 1
                        self._released.set()
        except TimeoutError:
            error = self._late(last, timeout_s)
            if server is not None:  # it may hang
                server.is_verified = False
                server.pause()
            raise error from None

    async def _next(self, refusals: Refusals) -> Server:
        """Return the server with the fewest open requests. If none may get this request now, wait for the first."""
        while True:
            now = time.monotonic()
            starts = {
                server: max(server.paused_until, refusals.until.get(server, 0.0))
                for server in self.all
                if server.n_open < self._per_server
            }
            if ready := [server for server, start in starts.items() if start <= now]:
                return min(ready, key=lambda server: server.n_open)
            self._released.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(starts.values()) - now if starts else None):
                    await self._released.wait()

    def _late(self, last: str, timeout_s: float) -> TeacherError:
        urls = ", ".join(server.endpoint.url for server in self.all)
        details = (f"the last failure: {last}",) if last else ()
        if last and not any(server.is_verified for server in self.all):
            return TeacherUnreachable(
                f"no server at {urls} within {timeout_s:g} s",
                address=urls,
                remedy="start it, or correct the URL",
                details=details,
            )
        return TeacherTimeout(
            f"no result from {urls} within {timeout_s:g} s", address=urls, stage="sent", details=details
        )

    async def get(self, server: Server, path: str) -> bytes | None:
        """Return the response to a GET request, None if the server has no such path. Errors as of `post`."""
        return await self._request("GET", server, path, None)

    async def post(self, server: Server, path: str, body: Mapping[str, Any]) -> bytes | None:
        """Return the response to a POST request, None if the server has no such path.

        Raises:
            ConnectionLost: The server cannot be reached.
            ServerFull: It accepts no request now.
            ServerFault: It failed for an unknown reason.
            TeacherRequestError: It refused the request.
            TeacherSetupError: It refused the key.
        """
        return await self._request("POST", server, path, body)

    async def _request(self, method: str, server: Server, path: str, body: Mapping[str, Any] | None) -> bytes | None:
        url, key = server.endpoint.url + path, server.endpoint.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with self._session.request(method, url, json=body, headers=headers) as response:
                content = await response.read()
                status, pause = response.status, response.headers.get("Retry-After")
                server.last_response = time.monotonic()
        except aiohttp.InvalidURL as error:
            raise TeacherSetupError(f"{url} is no valid URL: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"{type(error).__name__}: {error}") from None
        return _checked(status, content, pause, server)


class ServerFault(Exception):
    """The server failed for an unknown reason, which may be the request."""


def _checked(status: int, content: bytes, pause: str | None, server: Server) -> bytes | None:
    """Return the content of a response. Errors see `Servers.post`."""
    if status == 200:
        return content
    text = _message(content)
    if status in _FULL:
        raise ServerFull(f"HTTP {status}: {text}", _seconds(pause))
    if status in _GATEWAY:
        raise ConnectionLost(f"HTTP {status}: {text}")
    if status in _KEY:
        found = "without a key" if not server.endpoint.api_key else "with its key"
        raise TeacherSetupError(
            f"{server.endpoint.url} refused a request {found} (HTTP {status}: {text})",
            address=server.endpoint.url,
            remedy="set api_key_env to the environment variable with the server's API key",
        )
    if status >= 500:
        raise ServerFault(f"HTTP {status}: {text}")
    if status in (404, 405):
        if "model" not in text.lower():
            return None
        what = f"{server.endpoint.url} refused the model of the request (HTTP {status}: {text})"
        raise TeacherChanged(what, address=server.endpoint.url)
    raise TeacherRequestError(f"HTTP {status}: {text}", address=server.endpoint.url)


def _message(content: bytes) -> str:
    """Return the message of an error's body, cut to a readable length."""
    text = " ".join(content.decode("utf-8", errors="replace").split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _seconds(pause: str | None) -> float | None:
    """Return the value of a header ``Retry-After``: seconds, or a date. None if there is none, or it is invalid."""
    if pause is None:
        return None
    try:
        return max(0.0, float(pause))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(pause).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


async def ensure_verified(server: Server, verify: Callable[[Server], Awaitable[None]]) -> None:
    """Verify a server that is not verified, or not any more.

    Raises:
        ConnectionLost: It cannot be reached, or was not verified within `VERIFY_TIMEOUT_S`.
        ServerFull: It accepts no request now.
        ServerFault: It failed for an unknown reason.
        TeacherError: It cannot be used, or has another model.
    """
    if server.n_open == 1 and time.monotonic() - server.last_response > MAX_IDLE_S:
        server.is_verified = False
    if server.is_verified:
        return
    async with server.lock:  # one request verifies, the others wait
        if server.is_verified:
            return
        try:
            async with asyncio.timeout(VERIFY_TIMEOUT_S) as limit:
                await verify(server)
        except TimeoutError:
            if limit.expired():
                raise ConnectionLost(f"it was not verified within {VERIFY_TIMEOUT_S:g} s") from None
            raise
        server.is_verified = True


def _as_error(fault: Exception, server: Server) -> TeacherError:
    """Return the error for the user. A server that fails may refuse the request; one without valid JSON is broken."""
    url, what = server.endpoint.url, f"failed {MAX_FAULTS} times: {short(fault)}"
    if isinstance(fault, TeacherProtocolError):
        remedy = "check the server, and proxies before it that cut responses"
        return TeacherUnavailable(what, address=url, remedy=remedy)
    return TeacherRequestError(what, address=url, remedy="see the log of the server")
