"""Orderly stop of a proxy.

==========  =====================================  ==========  ================================================
state       event                                  next state  action
==========  =====================================  ==========  ================================================
serving     stop signal                            draining    waiting requests get RetryLater
draining    new request, or a request lost its     draining    the request gets RetryLater
            worker
draining    no open request and no unread reply    drained     the proxy ends
draining    DRAIN_TIMEOUT_S passed                 drained     open requests get RetryLater; the proxy ends
==========  =====================================  ==========  ================================================

A client keeps a request that gets RetryLater, and sends it again when a service is available.
"""

from __future__ import annotations

DRAIN_TIMEOUT_S = 5.0
DRAIN_REASON = "the proxy is shutting down"


class Drain:
    """Drain state of a proxy. Times come from ``time.monotonic()``.

    Attributes:
        deadline: Time at which the proxy ends, None while it serves.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None

    @property
    def is_active(self) -> bool:
        """True after the stop signal."""
        return self.deadline is not None

    def begin(self, now: float) -> None:
        """Start to drain."""
        self.deadline = now + DRAIN_TIMEOUT_S

    def is_finished(self, now: float, *, has_work: bool) -> bool:
        """Return True if the proxy may end.

        Args:
            now: Current time.
            has_work: True if there are open requests or unread replies.
        """
        return self.deadline is not None and (not has_work or now >= self.deadline)
