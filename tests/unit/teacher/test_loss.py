"""A worker that is killed or hangs, a proxy that is restarted: what was asked is answered once, and soon."""

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
from teacher.wire.messages import Message, Probe, ScoreReply
from teacher.wire.sockets import WORKER_HEARTBEAT
from teacher.worker import Worker
from tests._support.fake_worker import FakeEngine, expected_answer, running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import StopFlag, running_proxy

pytestmark = pytest.mark.timeout(60)

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
        process.communicate(timeout=10)


@pytest.fixture
def asker(proxy: Proxy) -> Iterator[zmq.Socket]:
    """No TeacherClient: that one drops a second answer by itself, this one sees all that the proxy sends."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{proxy.frontend_port}")
        yield socket


def asked(request_id: int) -> TeacherSequence:
    return TeacherSequence(np.array([1, request_id], np.int32), prompt_len=1)


def await_n_workers(client: TeacherClient, n_workers: int) -> None:
    deadline = time.monotonic() + 20
    while client.hello().n_workers != n_workers:
        assert time.monotonic() < deadline, f"not {n_workers} workers after 20 s"
        threading.Event().wait(0.05)


def ask_of(process: subprocess.Popen[str], asker: zmq.Socket) -> None:
    """Return once the process holds all requests."""
    for request_id in range(N_REQUESTS):
        asker.send_multipart(protocol.encode_score(request_id, 50.0, [asked(request_id)]))
    assert process.stdout is not None
    for _ in range(N_REQUESTS):
        assert process.stdout.readline().startswith("added")


def next_message(asker: zmq.Socket, timeout_s: float) -> Message | None:
    """But for probes, which want no answer."""
    while asker.poll(int(1000 * max(0.0, timeout_s))):
        message = protocol.decode(asker.recv_multipart())
        if not isinstance(message, Probe):
            return message
    return None


def assert_each_is_answered_once(asker: zmq.Socket, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    pending = set(range(N_REQUESTS))
    while pending:
        message = next_message(asker, deadline - time.monotonic())
        assert isinstance(message, ScoreReply), f"{pending} open after {timeout_s} s"
        np.testing.assert_array_equal(
            message.scored[0].topk_ids_TK, expected_answer(asked(message.request_id)).topk_ids_TK
        )
        pending.remove(message.request_id)


def test_the_requests_of_a_killed_worker_are_answered_by_another_at_once(proxy: Proxy, asker: zmq.Socket) -> None:
    with worker_process(proxy.backend_port) as victim:
        ask_of(victim, asker)
        with running_worker(proxy.backend_port):
            victim.kill()
            assert_each_is_answered_once(asker, WORKER_HEARTBEAT.interval_s + SLACK_S)


@pytest.mark.slow  # test_chaos stops a real one
def test_the_requests_of_a_stopped_worker_are_answered_once_though_it_comes_back_and_answers_too(
    proxy: Proxy, asker: zmq.Socket
) -> None:
    with worker_process(proxy.backend_port) as victim, TeacherClient(server_port=proxy.frontend_port) as client:
        ask_of(victim, asker)
        with running_worker(proxy.backend_port):
            victim.send_signal(signal.SIGSTOP)
            assert_each_is_answered_once(asker, 2 * WORKER_HEARTBEAT.interval_s + WORKER_HEARTBEAT.timeout_s + SLACK_S)
            assert client.hello().n_workers == 1
            victim.send_signal(signal.SIGUSR1)  # first thing when it goes on: answer what it still holds
            victim.send_signal(signal.SIGCONT)
            await_n_workers(client, 2)
        await_n_workers(client, 1)
        assert len(client.submit([asked(7)], timeout_s=10).result()) == 1
        assert next_message(asker, 0.1) is None


@pytest.mark.slow
def test_a_long_engine_step_does_not_look_like_death(proxy: Proxy) -> None:
    with running_worker(proxy.backend_port) as worker, TeacherClient(server_port=proxy.frontend_port) as client:
        busy, quick_step = threading.Event(), worker.engine.step

        def step() -> list[tuple[int, ScoredSequence]]:
            busy.wait(WORKER_HEARTBEAT.timeout_s + 2 * WORKER_HEARTBEAT.interval_s + 1)
            return quick_step()

        worker.engine.step = step  # type: ignore[method-assign]
        future = client.submit([asked(3)], timeout_s=30)
        assert len(future.result()) == 1
        assert worker.engine.n_scored == 1 and client.hello().n_workers == 1


def test_a_restarted_proxy_gets_its_workers_back(caplog: pytest.LogCaptureFixture) -> None:
    port, backend_port = free_port(), free_port()
    with ExitStack() as stack:
        client = stack.enter_context(TeacherClient(server_port=port, timeout_s=20))
        with running_proxy(port, backend_port):
            stack.enter_context(running_worker(backend_port))
            assert client.hello().n_workers == 1
        threading.Event().wait(1.5 * WORKER_HEARTBEAT.interval_s)  # the worker would have said that it lives
        with running_proxy(port, backend_port):
            assert len(client.submit([asked(3)]).result()) == 1
            stack.close()  # while there is a proxy that hears the farewell
    assert "removed this worker" not in caplog.text


def test_a_request_that_is_dealt_to_the_same_worker_twice_is_scored_once() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as proxy:
        proxy.setsockopt(zmq.LINGER, 0)
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        stop = StopFlag()
        worker = threading.Thread(target=Worker(engine, backend_port=port).run, args=(stop,), daemon=True)
        worker.start()
        name = proxy.recv_multipart()[0]
        proxy.send_multipart([name, *protocol.encode_welcome()])
        for request_id in (7, 7, 8):
            proxy.send_multipart([name, *protocol.encode_score(request_id, 50.0, [asked(1)])])
        for _ in (7, 8):  # when 8 has come to the engine, the worker has read the second 7
            assert engine.added.acquire(timeout=20)
        engine.gate.set()
        answered: list[int] = []
        while len(answered) < 2 and proxy.poll(20_000):
            message = protocol.decode(proxy.recv_multipart()[1:])
            answered += [message.request_id] if isinstance(message, ScoreReply) else []
        assert worker.is_alive() and sorted(answered) == [7, 8]
        assert engine.n_scored == 2 and not engine.has_work()
        stop.set()
        worker.join(timeout=10)
        stop.close()
