"""Which requests of a client have no answer yet, and when each has to be sent. No sockets; the time is given.

A service that is full, or going down, puts requests off. Here they keep their order of age, and new ones queue up
behind them. For each request that leaves the service, and so makes room, the oldest is tried again; and the oldest few
are, after a delay that doubles while nothing leaves: so a client grows into a service that has become less busy, and a
full one hears little of it.
A new connection may lead to a new service, which knows nothing: everything is sent once more.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any

from teacher.client.calls import Call

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
RETRIES = 4
SENDS = 256
"""At a look: what comes back is read between them, and may say that the rest is to wait."""


@dataclass(eq=False)
class Request:
    """One row of the table. Ids grow with age."""

    request_id: int
    call: Call[Any]
    is_sent: bool = False  # and not put off since: the service may be at it
    put_off: str = ""  # why, in the service's words


class InFlight:
    """Single-threaded. Times are those of `Call.deadline`."""

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap, some of requests that are not open any more
        self._unsent: dict[int, Request] = {}  # to be sent at the next opportunity
        self._put_off: list[int] = []  # heap, some of requests that are not put off any more
        self._n_put_off = 0
        self._last_reason = ""
        self._retry_s, self._retry_at = FIRST_RETRY_S, 0.0
        self._n_departed = 0  # since the last look for what to send
        self._connected = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: Call[Any]) -> None:
        """All requests of a call whose `request_ids` are set."""
        for request_id in call.request_ids:
            request = self._open[request_id] = Request(request_id, call)
            heapq.heappush(self._deadlines, (call.deadline, request_id))
            if call.takes_place and self._n_put_off:
                self._queue(request, self._last_reason)
            else:
                self._unsent[request_id] = request

    def put_off(self, request_id: int, reason: str, now: float) -> None:
        request = self._open.get(request_id)
        if request is None or request.put_off:
            return
        if not self._n_put_off:
            self._retry_at = now + self._retry_s
        request.is_sent = False
        self._unsent.pop(request_id, None)
        self._last_reason = reason or "no reason given"
        self._queue(request, self._last_reason)
        for unsent in [unsent for unsent in self._unsent.values() if unsent.call.takes_place]:  # they fare no better
            del self._unsent[unsent.request_id]
            self._queue(unsent, self._last_reason)

    def remove(self, request_id: int) -> Request | None:
        """Answered, failed or cancelled. None if it is not known (any more)."""
        request = self._open.pop(request_id, None)
        if request is None:
            return None
        self._unsent.pop(request_id, None)
        if request.put_off:
            self._n_put_off -= 1
        else:
            self._n_departed += 1
        if len(self._deadlines) > 2 * len(self._open) + 64:  # else they would stay until their time is over
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
            heapq.heapify(self._deadlines)
        return request

    def expired(self, now: float) -> Call[Any] | None:
        """Some call whose deadline has passed."""
        while self._deadlines and (self._deadlines[0][1] not in self._open):
            heapq.heappop(self._deadlines)
        if self._deadlines and self._deadlines[0][0] <= now:
            return self._open[self._deadlines[0][1]].call
        return None

    def open_requests(self) -> list[Request]:
        return list(self._open.values())

    def connected(self) -> None:
        self._connected = True
        self._put_off.clear()
        self._n_put_off = 0
        self._retry_s = FIRST_RETRY_S
        for request in self._open.values():
            request.put_off = ""
        self._unsent = dict(self._open)

    def disconnected(self) -> None:
        self._connected = False

    def to_send(self, now: float) -> list[Request]:
        """What should be sent now; it counts as sent."""
        if not self._connected:
            return []
        n_retries = self._n_departed
        if self._n_departed:
            self._retry_s = FIRST_RETRY_S
        if self._n_put_off and self._retry_at <= now:
            n_retries += RETRIES
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
            self._retry_at = now + self._retry_s
        self._n_departed = 0
        sent_now = list(itertools.islice(self._unsent.values(), SENDS))
        for request in sent_now:
            del self._unsent[request.request_id]
        requests = [*sent_now, *self._oldest_put_off(n_retries)]
        for request in requests:
            request.is_sent = True
        return requests

    def wake_at(self) -> float | None:
        """When there may be something to do, if nothing happens before."""
        if self._unsent and self._connected:
            return 0.0
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._n_put_off and self._connected:
            times.append(self._retry_at)
        return min(times, default=None)

    def _queue(self, request: Request, reason: str) -> None:
        request.put_off = reason
        self._n_put_off += 1
        heapq.heappush(self._put_off, request.request_id)

    def _oldest_put_off(self, n: int) -> list[Request]:
        found: list[Request] = []
        while self._put_off and len(found) < n:
            request = self._open.get(heapq.heappop(self._put_off))
            if request is not None and request.put_off:
                request.put_off = ""
                self._n_put_off -= 1
                found.append(request)
        return found
