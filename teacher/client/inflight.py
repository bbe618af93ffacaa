"""Table of a client's open requests, and the schedule of their sends. It uses no sockets; callers pass the time.

States of a request (in ``InFlight``) and their transitions::

    state      | stored in             | leaves it when
    -----------|-----------------------|---------------------------------------------------------------
    unsent     | _unsent               | sent by to_send(); or deferred, together with another request
    sent       | _open, is_sent        | remove(); defer(); a new connection makes it unsent
    deferred   | _deferred, with a     | to_send() retries it (sent); remove(); a new connection makes
               | defer_reason          | it unsent
    removed    | nowhere               | never: a reply, an error, a cancellation or the deadline ended it

A service that is full, or stops, defers requests. Deferred requests keep their order of age, and new requests queue
behind them. Two events retry deferred requests. Each request that ends frees a slot for the oldest deferred one.
Apart from that the oldest few are retried after a delay, which doubles while no request ends. The client
therefore fills a service that becomes less busy, and sends little to a full one.

A new connection may lead to a new service without state, so all open requests are sent again.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any

from teacher.client.calls import Call

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.05, 1.0
RETRIES_PER_DELAY = 4
MAX_SENDS_PER_ROUND = 256  # replies are read between rounds; one of them may defer the remaining requests


@dataclass(eq=False)
class Request:
    """One row of the table.

    Attributes:
        request_id: Id of the request. Ids grow with age.
        call: Call that the request belongs to.
        is_sent: True if it was sent and not deferred since, so that the service may be working on it.
        defer_reason: Reason that the service gave for the deferral; empty if the request is not deferred.
    """

    request_id: int
    call: Call[Any]
    is_sent: bool = False
    defer_reason: str = ""


class InFlight:
    """Open requests of one client. Not thread-safe. Times are in `time.monotonic` seconds, like `Call.deadline`."""

    def __init__(self) -> None:
        """Create an empty table without a connection."""
        self._open: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap; may contain requests that are no longer open
        self._unsent: dict[int, Request] = {}
        self._deferred: list[int] = []  # heap; may contain requests that are no longer deferred
        self._n_deferred = 0
        self._last_reason = ""
        self._retry_delay_s, self._retry_at = MIN_RETRY_DELAY_S, 0.0
        self._n_ended = 0  # since the last call of `to_send`
        self._connected = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, call: Call[Any]) -> None:
        """Add all requests of a call. Its `request_ids` must be set."""
        for request_id in call.request_ids:
            request = self._open[request_id] = Request(request_id, call)
            heapq.heappush(self._deadlines, (call.deadline, request_id))
            if call.uses_queue and self._n_deferred:
                self._push_deferred(request, self._last_reason)
            else:
                self._unsent[request_id] = request

    def defer(self, request_id: int, reason: str, now: float) -> None:
        """Defer a request, and with it all unsent requests for the service's queue. Unknown ids are ignored."""
        request = self._open.get(request_id)
        if request is None or request.defer_reason:
            return
        if not self._n_deferred:
            self._retry_at = now + self._retry_delay_s
        request.is_sent = False
        self._unsent.pop(request_id, None)
        self._last_reason = reason or "no reason given"
        self._push_deferred(request, self._last_reason)
        for unsent in [unsent for unsent in self._unsent.values() if unsent.call.uses_queue]:
            del self._unsent[unsent.request_id]
            self._push_deferred(unsent, self._last_reason)

    def remove(self, request_id: int) -> Request | None:
        """Remove and return a request that ended. Return None if it is not open."""
        request = self._open.pop(request_id, None)
        if request is None:
            return None
        self._unsent.pop(request_id, None)
        if request.defer_reason:
            self._n_deferred -= 1
        else:
            self._n_ended += 1
        if len(self._deadlines) > 2 * len(self._open) + 64:  # bound the stale entries, which stay until their deadline
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
            heapq.heapify(self._deadlines)
        return request

    def expired(self, now: float) -> Call[Any] | None:
        """Return a call whose deadline has passed, or None."""
        while self._deadlines and (self._deadlines[0][1] not in self._open):
            heapq.heappop(self._deadlines)
        if self._deadlines and self._deadlines[0][0] <= now:
            return self._open[self._deadlines[0][1]].call
        return None

    def open_requests(self) -> list[Request]:
        """Return all open requests."""
        return list(self._open.values())

    def on_connect(self) -> None:
        """Make all open requests unsent."""
        self._connected = True
        self._deferred.clear()
        self._n_deferred = 0
        self._retry_delay_s = MIN_RETRY_DELAY_S
        for request in self._open.values():
            request.defer_reason = ""
        self._unsent = dict(self._open)

    def on_disconnect(self) -> None:
        """Stop sending until the next connection."""
        self._connected = False

    def to_send(self, now: float) -> list[Request]:
        """Return the requests to send now, and mark them as sent."""
        if not self._connected:
            return []
        n_retries = self._n_ended
        if self._n_ended:
            self._retry_delay_s = MIN_RETRY_DELAY_S
        if self._n_deferred and self._retry_at <= now:
            n_retries += RETRIES_PER_DELAY
            self._retry_delay_s = min(2 * self._retry_delay_s, MAX_RETRY_DELAY_S)
            self._retry_at = now + self._retry_delay_s
        self._n_ended = 0
        new = list(itertools.islice(self._unsent.values(), MAX_SENDS_PER_ROUND))
        for request in new:
            del self._unsent[request.request_id]
        requests = [*new, *self._pop_oldest_deferred(n_retries)]
        for request in requests:
            request.is_sent = True
        return requests

    def wake_at(self) -> float | None:
        """Return the next time at which a request is due for a send or a timeout. Return None if there is none."""
        if self._unsent and self._connected:
            return 0.0
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._n_deferred and self._connected:
            times.append(self._retry_at)
        return min(times, default=None)

    def _push_deferred(self, request: Request, reason: str) -> None:
        request.defer_reason = reason
        self._n_deferred += 1
        heapq.heappush(self._deferred, request.request_id)

    def _pop_oldest_deferred(self, n: int) -> list[Request]:
        found: list[Request] = []
        while self._deferred and len(found) < n:
            request = self._open.get(heapq.heappop(self._deferred))
            if request is not None and request.defer_reason:
                request.defer_reason = ""
                self._n_deferred -= 1
                found.append(request)
        return found
