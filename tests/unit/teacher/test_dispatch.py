"""The proxy's memory: what is dealt to whom, by tokens, and what becomes of the requests of a worker that is lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from teacher.errors import TeacherRequestError
from teacher.proxy.admission import OVERFILL_FACTOR, QueueFull, QueueLimits
from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.jobs import MAX_LOSSES, RegisteredWorker, RequestKey
from tests._support.fake_worker import INFO, OTHER_INFO

ANN, BOB = b"ann", b"bob"


def dispatcher_with(*capacities: int, max_queue_tokens: int = 10**6) -> Dispatcher:
    dispatcher = Dispatcher(QueueLimits(max_queue_tokens))
    for number, capacity in enumerate(capacities):
        dispatcher.add_worker(worker(number, capacity))
    return dispatcher


def worker(number: int, capacity_tokens: int = 100) -> RegisteredWorker:
    return RegisteredWorker(b"worker %d" % number, f"host:{number}", INFO, capacity_tokens)


def ask(dispatcher: Dispatcher, client: bytes, *sizes: int, first_id: int = 0, deadline: float = 1e9) -> None:
    for number, n_tokens in enumerate(sizes, first_id):
        dispatcher.add_job(RequestKey(client, number), [], n_tokens, deadline, now=0.0)


def deal(dispatcher: Dispatcher) -> list[tuple[str, bytes, int]]:
    """All that can be dealt now: (worker, client, request id)."""
    dealt = []
    while (pair := dispatcher.assign()) is not None:
        dealt.append((pair[0].name, *pair[1].key))
    return dealt


def finish_all(dispatcher: Dispatcher) -> None:
    for at in dispatcher.workers.values():
        for job_id in list(at.in_flight):
            assert dispatcher.finish(at.identity, job_id) is not None


def test_two_clients_are_given_equally_many_tokens_whatever_the_size_of_their_requests() -> None:
    dispatcher = dispatcher_with(1)
    ask(dispatcher, ANN, *[100] * 400)
    ask(dispatcher, BOB, *[10] * 4000)
    tokens: Counter[bytes] = Counter()
    for _ in range(500):
        for _, client, _ in deal(dispatcher):
            tokens[client] += 100 if client == ANN else 10
        finish_all(dispatcher)
        assert abs(tokens[ANN] - tokens[BOB]) <= 200
    assert tokens[ANN] > 5000


def test_who_was_idle_has_no_credit_and_who_is_alone_gets_all() -> None:
    dispatcher = dispatcher_with(1)
    ask(dispatcher, ANN, *[10] * 300)
    for _ in range(100):
        deal(dispatcher)
        finish_all(dispatcher)
    ask(dispatcher, BOB, *[10] * 100)
    dealt = []
    for _ in range(20):
        dealt += [client for _, client, _ in deal(dispatcher)]
        finish_all(dispatcher)
    assert abs(dealt.count(ANN) - dealt.count(BOB)) <= 2, "Bob does not get what Ann had while he was away"


def test_requests_go_to_the_worker_with_the_fewest_tokens() -> None:
    dispatcher = dispatcher_with(100, 100)
    ask(dispatcher, ANN, 90, 10, 10, 10, 10, 10, 10, 10, 10)
    workers = [name for name, *_ in deal(dispatcher)]
    assert workers == ["host:0"] + ["host:1"] * 8


def test_a_worker_has_its_capacity_and_always_one_request_to_go_on_with() -> None:
    dispatcher = dispatcher_with(100)
    ask(dispatcher, ANN, *[30] * 10)
    assert len(deal(dispatcher)) == 4, "below its capacity there is room for one more"
    large = dispatcher_with(100)
    ask(large, ANN, 5000, 5000, 5000)
    assert len(deal(large)) == 2, "one that runs and one to begin when it ends"


def test_a_lost_workers_requests_are_the_next_and_are_charged_once() -> None:
    dispatcher = dispatcher_with(40)
    ask(dispatcher, ANN, *[10] * 10)
    first = deal(dispatcher)
    repeated, given_up = dispatcher.remove_worker(b"worker 0", "killed")
    assert (len(repeated), given_up) == (4, [])
    dispatcher.add_worker(worker(1, 40))
    assert [number for *_, number in deal(dispatcher)] == [number for *_, number in first] == [0, 1, 2, 3]


def test_who_ends_every_worker_is_found_and_who_was_only_there_is_not_blamed() -> None:
    """Request 3 ends each worker that has it; the other nine are answered."""
    dispatcher, answered, blamed, lost = Dispatcher(), set(), [], 0
    ask(dispatcher, ANN, *[10] * 10)
    for number in range(50):
        dispatcher.add_worker(worker(number))
        deal(dispatcher)
        at = dispatcher.workers[b"worker %d" % number]
        if any(job.key.request_id == 3 for job in at.in_flight.values()):
            lost += 1
            blamed += dispatcher.remove_worker(at.identity, "died")[1]
        else:
            answered |= {job.key.request_id for job in at.in_flight.values()}
            finish_all(dispatcher)
            dispatcher.remove_worker(at.identity, "left", left=True)
    assert answered == {0, 1, 2, 4, 5, 6, 7, 8, 9}
    assert [job.key.request_id for job, _ in blamed] == [3] and lost == MAX_LOSSES
    assert f"{MAX_LOSSES} workers were lost with this request; last: died" in str(blamed[0][1])


def test_a_suspect_has_a_worker_for_itself_while_others_go_on() -> None:
    dispatcher = Dispatcher()
    ask(dispatcher, ANN, 10)
    for number in range(MAX_LOSSES - 1):
        dispatcher.add_worker(worker(number))
        deal(dispatcher)
        dispatcher.remove_worker(b"worker %d" % number, "died")
    for number in (10, 11):
        dispatcher.add_worker(worker(number))
    ask(dispatcher, BOB, *[10] * 5)
    dealt = deal(dispatcher)
    of_suspect = next(name for name, client, _ in dealt if client == ANN)
    assert {name for name, client, _ in dealt if client == BOB} == {"host:10", "host:11"} - {of_suspect}


def test_a_suspect_waits_for_an_idle_worker_and_is_not_starved() -> None:
    dispatcher = dispatcher_with(100)
    ask(dispatcher, ANN, 10)
    for number in range(MAX_LOSSES - 1):
        deal(dispatcher)
        dispatcher.remove_worker(b"worker %d" % number, "died")
        dispatcher.add_worker(worker(number + 1))
        if number < MAX_LOSSES - 2:
            continue
        ask(dispatcher, BOB, *[10] * 50)
    assert deal(dispatcher) == [(f"host:{MAX_LOSSES - 1}", ANN, 0)]
    finish_all(dispatcher)
    assert {client for _, client, _ in deal(dispatcher)} == {BOB}


def test_a_worker_that_leaves_in_order_is_nobodys_fault() -> None:
    dispatcher = Dispatcher()
    ask(dispatcher, ANN, 10)
    for number in range(3 * MAX_LOSSES):
        dispatcher.add_worker(worker(number))
        assert len(deal(dispatcher)) == 1
        assert dispatcher.remove_worker(b"worker %d" % number, "stopped", left=True)[1] == []


def test_a_full_queue_is_told_to_who_fills_it_and_others_still_get_their_share() -> None:
    dispatcher = dispatcher_with(max_queue_tokens=100)
    ask(dispatcher, ANN, *[10] * 10)
    with pytest.raises(QueueFull, match="10 requests with 100 tokens wait"):
        ask(dispatcher, ANN, 10, first_id=10)
    ask(dispatcher, BOB, *[10] * 5)
    with pytest.raises(QueueFull):
        ask(dispatcher, BOB, 10, first_id=5)
    ask(dispatcher, b"eve", 500)  # one of each client always has a place
    with pytest.raises(QueueFull):
        ask(dispatcher, b"eve", 1, first_id=1)
    dispatcher.add_worker(worker(0, 1))
    deal(dispatcher)
    assert dispatcher.queue.n_tokens == 650 - sum(w.load_tokens for w in dispatcher.workers.values())


def fill(dispatcher: Dispatcher, client: bytes, n_tokens: int, at_most: int) -> int:
    """Return how many requests of this size are taken."""
    for number in range(at_most):
        try:
            ask(dispatcher, client, n_tokens, first_id=number)
        except QueueFull:
            return number
    return at_most


def test_a_queue_is_full_by_count_as_well_as_by_tokens_and_each_client_has_its_share_of_both() -> None:
    dispatcher = Dispatcher(QueueLimits(max_tokens=10**6, max_requests=100))
    assert fill(dispatcher, ANN, 2, at_most=1000) == 100
    assert fill(dispatcher, BOB, 8, at_most=1000) == 50
    with pytest.raises(QueueFull, match="150 requests with 600 tokens wait"):
        ask(dispatcher, ANN, 2, first_id=1000)
    dispatcher.add_worker(worker(0, capacity_tokens=250))
    deal(dispatcher)  # by tokens, so more of Ann's than of Bob's
    assert dispatcher.queue.jobs_of(BOB) < 50 and fill(dispatcher, BOB, 8, at_most=1000) > 0


@pytest.mark.parametrize("n_tokens", [1, 50])
def test_no_number_of_clients_fills_more_than_the_limits_allow(n_tokens: int) -> None:
    """The first takes all, the next half of all, then a third: without a bound on the whole that grows for ever."""
    dispatcher = Dispatcher(QueueLimits(max_tokens=1000, max_requests=100))
    n_clients = 300
    for number in range(n_clients):
        fill(dispatcher, b"client %d" % number, n_tokens, at_most=200)
    assert dispatcher.queue.n_clients == n_clients, "one of each client always has a place"
    most = min(OVERFILL_FACTOR * 100, OVERFILL_FACTOR * 1000 // n_tokens)
    assert dispatcher.queue.n_jobs <= most + n_clients


def test_an_answered_request_leaves_nothing_behind_whoever_waits_before_it() -> None:
    dispatcher = dispatcher_with(10**6)
    ask(dispatcher, ANN, 10, deadline=1.0)
    for first_id in range(1, 5000, 100):
        ask(dispatcher, BOB, *[10] * 100, first_id=first_id, deadline=2.0)
        deal(dispatcher)
        for job_id, job in list(dispatcher.workers[b"worker 0"].in_flight.items()):
            if job.key.client == BOB:
                dispatcher.finish(b"worker 0", job_id)
    assert len(dispatcher._open._deadlines) < 200


def test_a_copy_of_an_open_request_is_ignored_and_one_of_an_answered_request_is_not() -> None:
    dispatcher = dispatcher_with(100)
    for _ in range(3):
        ask(dispatcher, ANN, 10)
    assert len(deal(dispatcher)) == 1
    ask(dispatcher, ANN, 10)
    assert deal(dispatcher) == []
    finish_all(dispatcher)
    ask(dispatcher, ANN, 10)
    assert len(deal(dispatcher)) == 1


def test_an_answer_counts_once_and_only_from_who_has_the_request() -> None:
    dispatcher = dispatcher_with(100)
    ask(dispatcher, ANN, 10)
    first, job = dispatcher.assign() or pytest.fail("nothing was dealt")
    dispatcher.remove_worker(first.identity, "silent")
    dispatcher.add_worker(worker(1))
    second, _ = dispatcher.assign() or pytest.fail("nothing was dealt")
    assert dispatcher.finish(first.identity, job.job_id) is None
    assert dispatcher.finish(second.identity, job.job_id) is job
    assert dispatcher.finish(second.identity, job.job_id) is None


def test_what_expires_or_is_cancelled_is_gone_from_queue_and_worker() -> None:
    dispatcher = dispatcher_with(1)
    ask(dispatcher, ANN, 10, 10, 10, deadline=5.0)
    ask(dispatcher, ANN, 10, 10, first_id=3)
    deal(dispatcher)
    at = dispatcher.workers[b"worker 0"]
    assert dispatcher.next_deadline() == 5.0
    job, had = dispatcher.cancel(RequestKey(ANN, 0)) or pytest.fail("it was not open")
    assert had is at and job.key == (ANN, 0)
    assert dispatcher.cancel(RequestKey(ANN, 0)) is None
    expired = dispatcher.expire(5.0)
    assert [(job.key.request_id, where) for job, where in expired] == [(1, at), (2, None)]
    assert at.load_tokens == 0 and dispatcher.queue.n_tokens == 20
    assert {job.key.request_id for job in dispatcher.drop_waiting()} == {3, 4}
    assert not dispatcher.open_jobs and dispatcher.next_deadline() is None


def test_a_worker_with_another_model_is_refused() -> None:
    dispatcher = dispatcher_with(100)
    with pytest.raises(TeacherRequestError, match="CKPT_PATH"):
        dispatcher.add_worker(RegisteredWorker(b"other", "other:1", OTHER_INFO, 100))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_every_request_ends_exactly_once(seed: int) -> None:
    """Random arrivals, answers, losses, departures, cancellations and deadlines; the counts always agree."""
    rng = np.random.default_rng(seed)
    dispatcher, ended, asked, n_workers, now = Dispatcher(), Counter[tuple[bytes, int]](), 0, 0, 0.0

    def end(*keys: tuple[bytes, int]) -> None:
        ended.update(keys)

    for _ in range(3000):
        now += 1.0
        match rng.integers(7):
            case 0 | 1:
                dispatcher.add_job(RequestKey(rng.choice([ANN, BOB]), asked), [], int(rng.integers(1, 60)), now + 50, now)
                asked += 1
            case 2:
                deal(dispatcher)
            case 3 if dispatcher.workers:
                at = list(dispatcher.workers.values())[rng.integers(len(dispatcher.workers))]
                for job_id in list(at.in_flight)[:3]:
                    end(dispatcher.finish(at.identity, job_id).key)  # type: ignore[union-attr]
            case 4 if len(dispatcher.workers) < 3:
                dispatcher.add_worker(worker(n_workers))
                n_workers += 1
            case 5 if dispatcher.workers and rng.random() < 0.3:
                identity = list(dispatcher.workers)[rng.integers(len(dispatcher.workers))]
                end(*(job.key for job, _ in dispatcher.remove_worker(identity, "x", left=bool(rng.integers(2)))[1]))
            case 6 if dispatcher.open_jobs:
                key = list(dispatcher.open_jobs)[rng.integers(len(dispatcher.open_jobs))].key
                end(*[key] * (dispatcher.cancel(key) is not None))
        end(*(job.key for job, _ in dispatcher.expire(now)))
        waiting = [job.key for job in dispatcher.queue]
        assert dispatcher.queue.n_jobs == len(waiting)
        assert dispatcher.queue.n_tokens == sum(job.n_tokens for job in dispatcher.queue)
        for at in dispatcher.workers.values():
            assert at.load_tokens == sum(job.n_tokens for job in at.in_flight.values())
    end(*(job.key for job, _ in dispatcher.expire(now + 100)))
    assert len(ended) == asked > 500 and set(ended.values()) == {1}
    assert not dispatcher.open_jobs
