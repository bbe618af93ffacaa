"""Killed and stopped workers, and restarted proxies: every request is answered once, before its deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import zmq

from teacher import ScoredSequence, TeacherClient, TeacherSequence
from teacher.proxy import Proxy
from teacher.wire import protocol
from teacher.wire.messages import Score, ScoreReply, Welcome
from teacher.wire.sockets import WORKER_HEARTBEAT
from teacher.worker import Worker
from tests._support.fake_worker import FakeEngine, expected_scores, running_worker
from tests._support.ports import free_port
from tests._support.teacher_requests import RawPeer, make_sequence, raw_peer
from tests._support.teacher_service import StopFlag, running_proxy
from tests._support.waiting import wait_until

N_REQUESTS = 5
SLACK_S = 4.0


@contextmanager
def worker_process(backend_port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests._support.fake_worker", str(backend_port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def peer(proxy: Proxy) -> Iterator[RawPeer]:
    """A TeacherClient would drop a second reply to a request. A raw peer shows it."""
    with raw_peer(proxy.frontend_port) as connected:
        yield connected


def sequence_of(request_id: int) -> TeacherSequence:
    return make_sequence(1, request_id)


def wait_for_workers(client: TeacherClient, n_workers: int) -> None:
    wait_until(lambda: client.hello().n_workers == n_workers)


def submit_all(process: subprocess.Popen[str], peer: RawPeer) -> None:
    """Submit all requests, and wait until the process has them."""
    for request_id in range(N_REQUESTS):
        peer.submit(request_id, [sequence_of(request_id)], 50.0)
    assert process.stdout is not None
    for _ in range(N_REQUESTS):
        assert process.stdout.readline().startswith("added")


def assert_each_is_answered_once(peer: RawPeer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    pending = set(range(N_REQUESTS))
    while pending:
        message = peer.receive_or_none(deadline - time.monotonic())
        assert isinstance(message, ScoreReply), f"{pending} without a reply after {timeout_s} s"
        np.testing.assert_array_equal(
            message.scored[0].topk_ids_TK, expected_scores(sequence_of(message.request_id)).topk_ids_TK
        )
        pending.remove(message.request_id)


def test_requests_of_killed_worker_are_answered_by_another(proxy: Proxy, peer: RawPeer) -> None:
    with worker_process(proxy.backend_port) as victim:
        submit_all(victim, peer)
        with running_worker(proxy.backend_port):
            victim.kill()
            assert_each_is_answered_once(peer, WORKER_HEARTBEAT.interval_s + SLACK_S)


@pytest.mark.slow  # test_chaos stops a real worker
def test_requests_of_stopped_worker_are_answered_once(proxy: Proxy, peer: RawPeer) -> None:
    with worker_process(proxy.backend_port) as victim, TeacherClient(server_port=proxy.frontend_port) as client:
        submit_all(victim, peer)
        with running_worker(proxy.backend_port):
            victim.send_signal(signal.SIGSTOP)
            assert_each_is_answered_once(peer, 2 * WORKER_HEARTBEAT.interval_s + WORKER_HEARTBEAT.timeout_s + SLACK_S)
            assert client.hello().n_workers == 1
            victim.send_signal(signal.SIGUSR1)  # makes it answer its old requests as soon as it continues
            victim.send_signal(signal.SIGCONT)
            wait_for_workers(client, 2)
        wait_for_workers(client, 1)
        assert len(client.submit([sequence_of(7)], timeout_s=10).result()) == 1
        assert peer.receive_or_none(0.1) is None


@pytest.mark.slow
def test_long_engine_step_is_no_loss(proxy: Proxy) -> None:
    with running_worker(proxy.backend_port) as worker, TeacherClient(server_port=proxy.frontend_port) as client:
        busy, quick_step = threading.Event(), worker.engine.step

        def step() -> list[tuple[int, ScoredSequence]]:
            busy.wait(WORKER_HEARTBEAT.timeout_s + 2 * WORKER_HEARTBEAT.interval_s + 1)
            return quick_step()

        worker.engine.step = step  # type: ignore[method-assign]
        future = client.submit([sequence_of(3)], timeout_s=30)
        assert len(future.result()) == 1
        assert worker.engine.n_scored == 1 and client.hello().n_workers == 1


def test_workers_register_with_restarted_proxy(caplog: pytest.LogCaptureFixture) -> None:
    port, backend_port = free_port(), free_port()
    with ExitStack() as stack:
        client = stack.enter_context(TeacherClient(server_port=port, timeout_s=20))
        with running_proxy(port, backend_port):
            stack.enter_context(running_worker(backend_port))
            assert client.hello().n_workers == 1
        threading.Event().wait(1.5 * WORKER_HEARTBEAT.interval_s)  # the worker would have sent a heartbeat
        with running_proxy(port, backend_port):
            assert len(client.submit([sequence_of(3)]).result()) == 1
            stack.close()  # while a proxy can receive the Goodbye
    assert "removed this worker" not in caplog.text


def test_worker_scores_repeated_request_once() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        proxy.setsockopt(zmq.LINGER, 0)
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        stop = StopFlag()
        worker = threading.Thread(target=Worker(engine, backend_port=port).run, args=(stop,), daemon=True)
        worker.start()
        name = proxy.recv_multipart()[0]
        proxy.send_multipart([name, *protocol.encode(Welcome())])
        for request_id in (7, 7, 8):
            proxy.send_multipart([name, *protocol.encode(Score(request_id, 50.0, [sequence_of(1)]))])
        for _ in (7, 8):  # when 8 is in the engine, the worker has read the second 7
            assert engine.added.acquire(timeout=60)
        engine.gate.set()
        answered: list[int] = []
        while len(answered) < 2 and proxy.poll(20_000):
            message = protocol.decode(proxy.recv_multipart()[1:])
            answered += [message.request_id] if isinstance(message, ScoreReply) else []
        assert worker.is_alive() and sorted(answered) == [7, 8]
        assert engine.n_scored == 2 and not engine.has_work()
        stop.set()
        worker.join(timeout=60)
        stop.close()
