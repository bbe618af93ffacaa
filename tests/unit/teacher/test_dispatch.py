"""Dispatcher: assignment by tokens, fair queue, admission, and the requests of lost workers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from teacher.errors import TeacherRequestError
from teacher.proxy.admission import OVERFILL_FACTOR, QueueFull, QueueLimits
from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.jobs import MAX_LOSSES, RegisteredWorker, RequestKey
from tests._support.errors import raises
from tests._support.fake_worker import INFO, OTHER_INFO

ANN, BOB = b"ann", b"bob"


def make_dispatcher(*capacities: int, max_queue_tokens: int = 10**6) -> Dispatcher:
    dispatcher = Dispatcher(QueueLimits(max_queue_tokens))
    for number, capacity in enumerate(capacities):
        dispatcher.add_worker(make_worker(number, capacity))
    return dispatcher


def make_worker(number: int, capacity_tokens: int = 100) -> RegisteredWorker:
    return RegisteredWorker(b"worker %d" % number, f"host:{number}", INFO, capacity_tokens)


def add_jobs(dispatcher: Dispatcher, client: bytes, *sizes: int, first_id: int = 0, deadline: float = 1e9) -> None:
    for number, n_tokens in enumerate(sizes, first_id):
        dispatcher.add_job(RequestKey(client, number), [], n_tokens, n_tokens, deadline, now=0.0)


def assign_all(dispatcher: Dispatcher) -> list[tuple[str, bytes, int]]:
    """Assign all requests that fit. Return (worker name, client, request id) of each."""
    assigned = []
    while (pair := dispatcher.assign()) is not None:
        assigned.append((pair[0].name, *pair[1].key))
    return assigned


def finish_all(dispatcher: Dispatcher) -> None:
    for at in dispatcher.workers.values():
        for job_id in list(at.in_flight):
            assert dispatcher.finish(at.identity, job_id) is not None


def fill(dispatcher: Dispatcher, client: bytes, n_tokens: int, at_most: int) -> int:
    """Add requests of one size until the queue is full. Return how many were admitted."""
    for number in range(at_most):
        try:
            add_jobs(dispatcher, client, n_tokens, first_id=number)
        except QueueFull:
            return number
    return at_most


class TestFairQueue:
    def test_queue_serves_clients_equally_by_tokens(self) -> None:
        dispatcher = make_dispatcher(1)
        add_jobs(dispatcher, ANN, *[100] * 400)
        add_jobs(dispatcher, BOB, *[10] * 4000)
        tokens: Counter[bytes] = Counter()
        for _ in range(500):
            for _, client, _ in assign_all(dispatcher):
                tokens[client] += 100 if client == ANN else 10
            finish_all(dispatcher)
            assert abs(tokens[ANN] - tokens[BOB]) <= 200
        assert tokens[ANN] > 5000

    def test_queue_idle_client_earns_no_credit(self) -> None:
        dispatcher = make_dispatcher(1)
        add_jobs(dispatcher, ANN, *[10] * 300)
        for _ in range(100):
            assign_all(dispatcher)
            finish_all(dispatcher)
        add_jobs(dispatcher, BOB, *[10] * 100)
        assigned = []
        for _ in range(20):
            assigned += [client for _, client, _ in assign_all(dispatcher)]
            finish_all(dispatcher)
        assert abs(assigned.count(ANN) - assigned.count(BOB)) <= 2, "Bob earns no credit while he is idle"


class TestAssign:
    def test_assign_chooses_least_loaded_worker(self) -> None:
        dispatcher = make_dispatcher(100, 100)
        add_jobs(dispatcher, ANN, 90, 10, 10, 10, 10, 10, 10, 10, 10)
        workers = [name for name, *_ in assign_all(dispatcher)]
        assert workers == ["host:0"] + ["host:1"] * 8

    def test_assign_fills_capacity_and_one_request_ahead(self) -> None:
        dispatcher = make_dispatcher(100)
        add_jobs(dispatcher, ANN, *[30] * 10)
        assert len(assign_all(dispatcher)) == 4, "a worker below its capacity gets one more request"
        large = make_dispatcher(100)
        add_jobs(large, ANN, 5000, 5000, 5000)
        assert len(assign_all(large)) == 2, "one request runs and one is ready"

    def test_add_worker_with_other_model_is_refused(self) -> None:
        dispatcher = make_dispatcher(100)
        with raises(TeacherRequestError) as caught:
            dispatcher.add_worker(RegisteredWorker(b"other", "other:1", OTHER_INFO, 100))
        header, row = caught.value.details
        assert header.split() == ["service", "new", "worker"]
        assert row.split() == ["tokenizer_fingerprint", "none", "another"]
        assert "CKPT_PATH" in caught.value.options


class TestLostWorkers:
    def test_last_removal_includes_sign_offs_only_after_removal(self) -> None:
        dispatcher = Dispatcher()
        dispatcher.add_worker(make_worker(0, 40))
        assert dispatcher.last_removal == "no worker was removed"
        dispatcher.remove_worker(b"worker 0", "left: stopped", signed_off=True)
        assert dispatcher.last_removal == "left: stopped"

    def test_requests_of_lost_worker_are_next(self) -> None:
        dispatcher = make_dispatcher(40)
        add_jobs(dispatcher, ANN, *[10] * 10)
        first = assign_all(dispatcher)
        requeued, rejected = dispatcher.remove_worker(b"worker 0", "killed")
        assert (len(requeued), rejected) == (4, [])
        dispatcher.add_worker(make_worker(1, 40))
        assert [number for *_, number in assign_all(dispatcher)] == [number for *_, number in first] == [0, 1, 2, 3]

    def test_request_that_kills_workers_fails_alone(self) -> None:
        """Request 3 kills every worker that has it. The other nine are scored."""
        dispatcher, scored, rejected, lost = Dispatcher(), set(), [], 0
        add_jobs(dispatcher, ANN, *[10] * 10)
        for number in range(50):
            dispatcher.add_worker(make_worker(number))
            assign_all(dispatcher)
            at = dispatcher.workers[b"worker %d" % number]
            if any(job.key.request_id == 3 for job in at.in_flight.values()):
                lost += 1
                rejected += dispatcher.remove_worker(at.identity, "died")[1]
            else:
                scored |= {job.key.request_id for job in at.in_flight.values()}
                finish_all(dispatcher)
                dispatcher.remove_worker(at.identity, "left", signed_off=True)
        assert scored == {0, 1, 2, 4, 5, 6, 7, 8, 9}
        assert [job.key.request_id for job, _ in rejected] == [3] and lost == MAX_LOSSES
        assert rejected[0][1].n_losses == MAX_LOSSES

    def test_quarantined_request_runs_alone(self) -> None:
        dispatcher = Dispatcher()
        add_jobs(dispatcher, ANN, 10)
        for number in range(MAX_LOSSES - 1):
            dispatcher.add_worker(make_worker(number))
            assign_all(dispatcher)
            dispatcher.remove_worker(b"worker %d" % number, "died")
        for number in (10, 11):
            dispatcher.add_worker(make_worker(number))
        add_jobs(dispatcher, BOB, *[10] * 5)
        assigned = assign_all(dispatcher)
        quarantine_worker = next(name for name, client, _ in assigned if client == ANN)
        assert {name for name, client, _ in assigned if client == BOB} == {"host:10", "host:11"} - {quarantine_worker}

    def test_quarantined_request_is_not_starved(self) -> None:
        dispatcher = make_dispatcher(100)
        add_jobs(dispatcher, ANN, 10)
        for number in range(MAX_LOSSES - 1):
            assign_all(dispatcher)
            dispatcher.remove_worker(b"worker %d" % number, "died")
            dispatcher.add_worker(make_worker(number + 1))
            if number < MAX_LOSSES - 2:
                continue
            add_jobs(dispatcher, BOB, *[10] * 50)
        assert assign_all(dispatcher) == [(f"host:{MAX_LOSSES - 1}", ANN, 0)]
        finish_all(dispatcher)
        assert {client for _, client, _ in assign_all(dispatcher)} == {BOB}

    def test_orderly_leave_counts_no_loss(self) -> None:
        dispatcher = Dispatcher()
        add_jobs(dispatcher, ANN, 10)
        for number in range(3 * MAX_LOSSES):
            dispatcher.add_worker(make_worker(number))
            assert len(assign_all(dispatcher)) == 1
            assert dispatcher.remove_worker(b"worker %d" % number, "stopped", signed_off=True)[1] == []


class TestAdmission:
    def test_full_queue_admits_clients_below_their_share(self) -> None:
        dispatcher = make_dispatcher(max_queue_tokens=100)
        add_jobs(dispatcher, ANN, *[10] * 10)
        with pytest.raises(QueueFull) as full:
            add_jobs(dispatcher, ANN, 10, first_id=10)
        assert (full.value.n_requests, full.value.n_ids) == (10, 100)
        add_jobs(dispatcher, BOB, *[10] * 5)
        with pytest.raises(QueueFull):
            add_jobs(dispatcher, BOB, 10, first_id=5)
        add_jobs(dispatcher, b"eve", 500)  # one request of each client is always admitted
        with pytest.raises(QueueFull):
            add_jobs(dispatcher, b"eve", 1, first_id=1)
        dispatcher.add_worker(make_worker(0, 1))
        assign_all(dispatcher)
        assert dispatcher.queue.n_ids == 650 - sum(w.load_tokens for w in dispatcher.workers.values())

    def test_support_ids_count_as_memory_and_not_as_work(self) -> None:
        dispatcher = make_dispatcher(max_queue_tokens=100)
        for number in range(2):
            dispatcher.add_job(RequestKey(ANN, number), [], 10, 50, 1e9, now=0.0)
        with pytest.raises(QueueFull) as full:
            add_jobs(dispatcher, ANN, 1, first_id=2)
        assert full.value.n_ids == 100
        dispatcher.add_worker(make_worker(0, capacity_tokens=20))
        assert len(assign_all(dispatcher)) == 2 and dispatcher.workers[b"worker 0"].load_tokens == 20
        assert dispatcher.queue.n_ids == 0

    def test_full_queue_limits_count_and_tokens(self) -> None:
        dispatcher = Dispatcher(QueueLimits(max_tokens=10**6, max_requests=100))
        assert fill(dispatcher, ANN, 2, at_most=1000) == 100
        assert fill(dispatcher, BOB, 8, at_most=1000) == 50
        with pytest.raises(QueueFull) as full:
            add_jobs(dispatcher, ANN, 2, first_id=1000)
        assert (full.value.n_requests, full.value.n_ids) == (150, 600)
        dispatcher.add_worker(make_worker(0, capacity_tokens=250))
        assign_all(dispatcher)  # fair by tokens, so more requests of Ann than of Bob
        assert dispatcher.queue.jobs_of(BOB) < 50 and fill(dispatcher, BOB, 8, at_most=1000) > 0

    @pytest.mark.parametrize("n_tokens", [1, 50])
    def test_queue_is_bounded_for_many_clients(self, n_tokens: int) -> None:
        """The first client fills the queue, the next adds a half, then a third. A total bound ends this growth."""
        dispatcher = Dispatcher(QueueLimits(max_tokens=1000, max_requests=100))
        n_clients = 300
        for number in range(n_clients):
            fill(dispatcher, b"client %d" % number, n_tokens, at_most=200)
        assert dispatcher.queue.n_clients == n_clients, "one request of each client is always admitted"
        most = min(OVERFILL_FACTOR * 100, OVERFILL_FACTOR * 1000 // n_tokens)
        assert dispatcher.queue.n_jobs <= most + n_clients


class TestOpenJobs:
    def test_finished_requests_leave_no_deadlines(self) -> None:
        dispatcher = make_dispatcher(10**6)
        add_jobs(dispatcher, ANN, 10, deadline=1.0)
        for first_id in range(1, 5000, 100):
            add_jobs(dispatcher, BOB, *[10] * 100, first_id=first_id, deadline=2.0)
            assign_all(dispatcher)
            for job_id, job in list(dispatcher.workers[b"worker 0"].in_flight.items()):
                if job.key.client == BOB:
                    dispatcher.finish(b"worker 0", job_id)
        assert len(dispatcher._open._deadlines) < 200

    def test_add_job_ignores_copy_of_open_request(self) -> None:
        dispatcher = make_dispatcher(100)
        for _ in range(3):
            add_jobs(dispatcher, ANN, 10)
        assert len(assign_all(dispatcher)) == 1
        add_jobs(dispatcher, ANN, 10)
        assert assign_all(dispatcher) == []
        finish_all(dispatcher)
        add_jobs(dispatcher, ANN, 10)
        assert len(assign_all(dispatcher)) == 1

    def test_finish_accepts_assigned_worker_once(self) -> None:
        dispatcher = make_dispatcher(100)
        add_jobs(dispatcher, ANN, 10)
        first, job = dispatcher.assign() or pytest.fail("nothing was assigned")
        dispatcher.remove_worker(first.identity, "silent")
        dispatcher.add_worker(make_worker(1))
        second, _ = dispatcher.assign() or pytest.fail("nothing was assigned")
        assert dispatcher.finish(first.identity, job.job_id) is None
        assert dispatcher.finish(second.identity, job.job_id) is job
        assert dispatcher.finish(second.identity, job.job_id) is None

    def test_expire_and_cancel_remove_request_everywhere(self) -> None:
        dispatcher = make_dispatcher(1)
        add_jobs(dispatcher, ANN, 10, 10, 10, deadline=5.0)
        add_jobs(dispatcher, ANN, 10, 10, first_id=3)
        assign_all(dispatcher)
        at = dispatcher.workers[b"worker 0"]
        assert dispatcher.next_deadline() == 5.0
        job, had = dispatcher.cancel(RequestKey(ANN, 0)) or pytest.fail("the request was not open")
        assert had is at and job.key == (ANN, 0)
        assert dispatcher.cancel(RequestKey(ANN, 0)) is None
        expired = dispatcher.expire(5.0)
        assert [(job.key.request_id, where) for job, where in expired] == [(1, at), (2, None)]
        assert at.load_tokens == 0 and dispatcher.queue.n_ids == 20
        assert {job.key.request_id for job in dispatcher.drop_waiting()} == {3, 4}
        assert not dispatcher.open_jobs and dispatcher.next_deadline() is None

    @pytest.mark.parametrize("seed", range(5))
    def test_random_events_end_every_request_once(self, seed: int) -> None:
        """Random arrivals, results, losses, departures, cancellations and deadlines. The counts always agree."""
        rng = np.random.default_rng(seed)
        dispatcher, ended, n_requests, n_workers, now = Dispatcher(), Counter[tuple[bytes, int]](), 0, 0, 0.0

        def end(*keys: tuple[bytes, int]) -> None:
            ended.update(keys)

        for _ in range(3000):
            now += 1.0
            match rng.integers(7):
                case 0 | 1:
                    key, n_tokens, n_support = RequestKey(rng.choice([ANN, BOB]), n_requests), *rng.integers(1, 60, 2)
                    dispatcher.add_job(key, [], int(n_tokens), int(n_tokens + n_support), now + 50, now)
                    n_requests += 1
                case 2:
                    assign_all(dispatcher)
                case 3 if dispatcher.workers:
                    at = list(dispatcher.workers.values())[rng.integers(len(dispatcher.workers))]
                    for job_id in list(at.in_flight)[:3]:
                        end(dispatcher.finish(at.identity, job_id).key)  # type: ignore[union-attr]
                case 4 if len(dispatcher.workers) < 3:
                    dispatcher.add_worker(make_worker(n_workers))
                    n_workers += 1
                case 5 if dispatcher.workers and rng.random() < 0.3:
                    identity = list(dispatcher.workers)[rng.integers(len(dispatcher.workers))]
                    end(
                        *(
                            job.key
                            for job, _ in dispatcher.remove_worker(identity, "x", signed_off=bool(rng.integers(2)))[1]
                        )
                    )
                case 6 if dispatcher.open_jobs:
                    key = list(dispatcher.open_jobs)[rng.integers(len(dispatcher.open_jobs))].key
                    end(*[key] * (dispatcher.cancel(key) is not None))
            end(*(job.key for job, _ in dispatcher.expire(now)))
            waiting = [job.key for job in dispatcher.queue]
            assert dispatcher.queue.n_jobs == len(waiting)
            assert dispatcher.queue.n_ids == sum(job.n_ids for job in dispatcher.queue)
            for at in dispatcher.workers.values():
                assert at.load_tokens == sum(job.n_tokens for job in at.in_flight.values())
        end(*(job.key for job, _ in dispatcher.expire(now + 100)))
        assert len(ended) == n_requests > 500 and set(ended.values()) == {1}
        assert not dispatcher.open_jobs


def test_add_worker_with_another_model_prints_what_differs() -> None:
    dispatcher = make_dispatcher(100)
    with raises(TeacherRequestError) as caught:
        dispatcher.add_worker(RegisteredWorker(b"other", "host:9", OTHER_INFO, 100))
    name = next(name for name, value in vars(INFO).items() if value != getattr(OTHER_INFO, name))
    equal = next(name for name, value in vars(INFO).items() if value == getattr(OTHER_INFO, name))
    row = next(line for line in caught.value.details if line.startswith(name))
    assert str(getattr(INFO, name)) in row and str(getattr(OTHER_INFO, name)) in row
    assert not any(line.startswith(equal) for line in caught.value.details)
