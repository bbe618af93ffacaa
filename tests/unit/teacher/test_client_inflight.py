"""Schedule of sends and retries, in virtual time and without sockets."""

from __future__ import annotations

from teacher.client.calls import Call
from teacher.client.inflight import MAX_RETRY_DELAY_S, MIN_RETRY_DELAY_S, RETRIES_PER_DELAY, InFlight
from teacher.wire.frames import Frame
from teacher.wire.messages import Message


class Work(Call[None]):
    def __init__(self, ids: range, deadline: float, uses_queue: bool = True) -> None:
        super().__init__("work", 1.0, len(ids))
        self.request_ids, self.deadline, self.uses_queue = ids, deadline, uses_queue

    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        raise NotImplementedError

    def accept(self, request_id: int, message: Message) -> None:
        raise NotImplementedError


def table(n_requests: int, deadline: float = 1000.0) -> InFlight:
    inflight = InFlight()
    inflight.on_connect()
    inflight.add(Work(range(1, n_requests + 1), deadline))
    return inflight


def sent(inflight: InFlight, now: float) -> list[int]:
    return [request.request_id for request in inflight.to_send(now)]


def test_request_before_connection_is_sent_on_connect() -> None:
    inflight = InFlight()
    inflight.add(Work(range(1, 4), 1000.0))
    assert sent(inflight, 0.0) == []
    inflight.on_connect()
    assert sent(inflight, 0.0) == [1, 2, 3]
    assert sent(inflight, 0.0) == []


def test_new_connection_resends_exactly_open_requests() -> None:
    inflight = table(4)
    sent(inflight, 0.0)
    inflight.defer(3, "full", 0.0)
    inflight.remove(2)
    inflight.on_disconnect()
    assert sent(inflight, 5.0) == []
    inflight.on_connect()
    assert sent(inflight, 5.0) == [1, 3, 4]


def test_full_service_retries_oldest_with_growing_delay() -> None:
    inflight = table(1000)
    for request_id in reversed(sent(inflight, 0.0)):
        inflight.defer(request_id, "full", 0.0)
    n_sent, now, gaps = 0, 0.0, []
    while now < 20:
        wake_at = inflight.wake_at()
        assert wake_at is not None and wake_at > now
        gaps.append(wake_at - now)
        now = wake_at
        tried = sent(inflight, now)
        assert tried == [1, 2, 3, 4]
        n_sent += len(tried)
        for request_id in tried:
            inflight.defer(request_id, "full", now)
    assert abs(gaps[0] - MIN_RETRY_DELAY_S) < 1e-6 and max(gaps) <= MAX_RETRY_DELAY_S + 1e-6
    assert n_sent <= RETRIES_PER_DELAY * 27


def test_removed_request_lets_oldest_deferred_be_sent() -> None:
    inflight = table(10)
    sent(inflight, 0.0)
    for request_id in range(2, 11):
        inflight.defer(request_id, "full", 0.0)
    inflight.remove(1)
    assert sent(inflight, 0.0) == [2]
    assert sent(inflight, 0.0) == []


def test_less_busy_service_is_filled_with_few_rejected_retries() -> None:
    """The service has room for 2 requests at first and for 32 later. It completes all of them 100 times a second."""
    n_requests, n_ticks = 5000, 200
    inflight = table(n_requests)
    arriving, n_deferred, n_running = sent(inflight, 0.0), 0, []
    for tick in range(n_ticks):
        room = 2 if tick < 50 else 32
        taken, refused = arriving[:room], arriving[room:]
        for request_id in refused:
            inflight.defer(request_id, "full", 0.01 * tick)
        for request_id in taken:
            inflight.remove(request_id)
        n_deferred += len(refused)
        n_running.append(len(taken))
        arriving = sent(inflight, 0.01 * tick)
    assert n_running[40:50] == [2] * 10 and n_running[-10:] == [32] * 10
    assert n_deferred - n_requests < RETRIES_PER_DELAY * n_ticks / 5


def test_new_requests_queue_behind_deferred_except_proxy_calls() -> None:
    inflight = table(1)
    sent(inflight, 0.0)
    inflight.defer(1, "full", 0.0)
    inflight.add(Work(range(2, 4), 1000.0))
    inflight.add(Work(range(4, 5), 1000.0, uses_queue=False))
    assert sent(inflight, 0.0) == [4]
    assert sent(inflight, MIN_RETRY_DELAY_S) == [1, 2, 3]


def test_removed_deferred_request_is_neither_sent_nor_cancelled() -> None:
    inflight = table(2)
    sent(inflight, 0.0)
    inflight.defer(1, "full", 0.0)
    removed = inflight.remove(1)
    assert removed is not None and not removed.is_sent and removed.defer_reason == "full"
    inflight.defer(1, "full", 0.0)
    assert inflight.remove(1) is None
    assert sent(inflight, 10.0) == []


def test_expired_returns_calls_in_deadline_order() -> None:
    inflight = InFlight()
    early, late = Work(range(1, 2), 1.0), Work(range(2, 3), 2.0)
    inflight.add(late)
    inflight.add(early)
    assert inflight.wake_at() == 1.0 and inflight.expired(0.9) is None
    assert inflight.expired(1.5) is early
    inflight.remove(1)
    assert inflight.expired(1.5) is None and inflight.expired(2.0) is late


def test_many_requests_leave_no_stale_deadlines() -> None:
    inflight = table(30_000)
    for request_id in sent(inflight, 0.0):
        inflight.defer(request_id, "full", 0.0)
    while len(inflight):
        inflight.wake_at()
        for request_id in sent(inflight, 1e9):
            inflight.remove(request_id)
    assert len(inflight._deadlines) <= 64
