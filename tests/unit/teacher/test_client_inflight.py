"""When a request is sent, and sent again: in virtual time, without sockets."""

from __future__ import annotations

import time

from teacher.client.calls import Call
from teacher.client.inflight import FIRST_RETRY_S, LAST_RETRY_S, RETRIES, InFlight
from teacher.wire.frames import Frame
from teacher.wire.messages import Message


class Work(Call[None]):
    def __init__(self, ids: range, deadline: float, takes_place: bool = True) -> None:
        super().__init__("work", 1.0, len(ids))
        self.request_ids, self.deadline, self.takes_place = ids, deadline, takes_place

    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        raise NotImplementedError

    def accept(self, request_id: int, message: Message) -> None:
        raise NotImplementedError


def table(n_requests: int, deadline: float = 1000.0) -> InFlight:
    inflight = InFlight()
    inflight.connected()
    inflight.add(Work(range(1, n_requests + 1), deadline))
    return inflight


def sent(inflight: InFlight, now: float) -> list[int]:
    return [request.request_id for request in inflight.to_send(now)]


def test_what_is_asked_without_a_connection_is_sent_with_the_first_one() -> None:
    inflight = InFlight()
    inflight.add(Work(range(1, 4), 1000.0))
    assert sent(inflight, 0.0) == []
    inflight.connected()
    assert sent(inflight, 0.0) == [1, 2, 3]
    assert sent(inflight, 0.0) == []


def test_a_new_connection_sends_all_that_is_open_once_more_and_nothing_else() -> None:
    inflight = table(4)
    sent(inflight, 0.0)
    inflight.put_off(3, "full", 0.0)
    inflight.remove(2)
    inflight.disconnected()
    assert sent(inflight, 5.0) == []
    inflight.connected()
    assert sent(inflight, 5.0) == [1, 3, 4]


def test_a_full_service_is_asked_seldom_and_by_the_oldest() -> None:
    inflight = table(1000)
    for request_id in reversed(sent(inflight, 0.0)):
        inflight.put_off(request_id, "full", 0.0)
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
            inflight.put_off(request_id, "full", now)
    assert abs(gaps[0] - FIRST_RETRY_S) < 1e-6 and max(gaps) <= LAST_RETRY_S + 1e-6
    assert n_sent <= RETRIES * 27


def test_an_answer_makes_room_for_the_oldest_at_once() -> None:
    inflight = table(10)
    sent(inflight, 0.0)
    for request_id in range(2, 11):
        inflight.put_off(request_id, "full", 0.0)
    inflight.remove(1)
    assert sent(inflight, 0.0) == [2]
    assert sent(inflight, 0.0) == []


def test_a_service_that_becomes_less_busy_is_filled_up_with_few_tries_in_vain() -> None:
    """It has room for 2 at first, later for 32, and answers all that it has 100 times a second."""
    n_requests, n_ticks = 5000, 200
    inflight = table(n_requests)
    arriving, n_put_off, n_running = sent(inflight, 0.0), 0, []
    for tick in range(n_ticks):
        room = 2 if tick < 50 else 32
        taken, refused = arriving[:room], arriving[room:]
        for request_id in refused:
            inflight.put_off(request_id, "full", 0.01 * tick)
        for request_id in taken:
            inflight.remove(request_id)
        n_put_off += len(refused)
        n_running.append(len(taken))
        arriving = sent(inflight, 0.01 * tick)
    assert n_running[40:50] == [2] * 10 and n_running[-10:] == [32] * 10
    assert n_put_off - n_requests < RETRIES * n_ticks / 5


def test_new_requests_queue_behind_those_put_off_but_questions_do_not() -> None:
    inflight = table(1)
    sent(inflight, 0.0)
    inflight.put_off(1, "full", 0.0)
    inflight.add(Work(range(2, 4), 1000.0))
    inflight.add(Work(range(4, 5), 1000.0, takes_place=False))
    assert sent(inflight, 0.0) == [4]
    assert sent(inflight, FIRST_RETRY_S) == [1, 2, 3]


def test_what_was_put_off_and_is_gone_is_neither_sent_nor_cancelled() -> None:
    inflight = table(2)
    sent(inflight, 0.0)
    inflight.put_off(1, "full", 0.0)
    removed = inflight.remove(1)
    assert removed is not None and not removed.is_sent and removed.put_off == "full"
    inflight.put_off(1, "full", 0.0)
    assert inflight.remove(1) is None
    assert sent(inflight, 10.0) == []


def test_deadlines_are_found_in_order_and_leave_nothing_behind() -> None:
    inflight = InFlight()
    early, late = Work(range(1, 2), 1.0), Work(range(2, 3), 2.0)
    inflight.add(late)
    inflight.add(early)
    assert inflight.wake_at() == 1.0 and inflight.expired(0.9) is None
    assert inflight.expired(1.5) is early
    inflight.remove(1)
    assert inflight.expired(1.5) is None and inflight.expired(2.0) is late


def test_thirty_thousand_requests_are_kept_in_linear_time_and_forgotten() -> None:
    began = time.monotonic()
    inflight = table(30_000)
    for request_id in sent(inflight, 0.0):
        inflight.put_off(request_id, "full", 0.0)
    while len(inflight):
        inflight.wake_at()
        for request_id in sent(inflight, 1e9):
            inflight.remove(request_id)
    assert time.monotonic() - began < 5
    assert len(inflight._deadlines) <= 64
