"""What the proxy and its workers do when one of them, or a client, hangs, is lost, or does not read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zmq

from teacher import TeacherChanged, TeacherClient, TeacherProtocolError, TeacherRequestError, TeacherSequence
from teacher.proxy import Proxy
from teacher.wire import protocol
from teacher.wire.messages import LIMITS, Ready, RetryLater, ScoreReply
from tests._support.fake_worker import INFO, FakeEngine, expected_answer, running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import running_proxy

pytestmark = pytest.mark.timeout(60)


def sequence(*token_ids: int, prompt_len: int = 1) -> TeacherSequence:
    return TeacherSequence(np.array(token_ids, np.int32), prompt_len)


def wait_until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        threading.Event().wait(0.02)


def is_answer_to(sequence: TeacherSequence, got: list[object]) -> bool:
    return np.array_equal(got[0].topk_ids_TK, expected_answer(sequence).topk_ids_TK)  # type: ignore[attr-defined]


class HangingEngine(FakeEngine):
    """A step that begins while `hangs` is set does not return before it is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def step(self) -> list[tuple[int, object]]:  # type: ignore[override]
        assert self.goes_on.wait(timeout=30)
        return super().step()  # type: ignore[return-value]


def test_an_engine_that_hangs_loses_its_work_to_another_and_may_come_back() -> None:
    with running_proxy(stall_timeout_s=1.3) as proxy, TeacherClient(server_port=proxy.frontend_port) as client:
        hanging = HangingEngine()
        with running_worker(proxy.backend_port, hanging) as worker:
            futures = [client.submit([sequence(1, i)], 20) for i in range(10)]
            assert hanging.added.acquire(timeout=5)
            with running_worker(proxy.backend_port):
                for i, future in enumerate(futures):
                    assert is_answer_to(sequence(1, i), future.result(timeout=10))
                assert proxy.latest_status.totals.workers_lost == 1
                assert client.hello().n_workers == 1
            hanging.goes_on.set()
            wait_until(lambda: len(proxy.latest_status.workers) == 1)
            assert is_answer_to(sequence(7, 8), client.submit([sequence(7, 8)], 20).result(timeout=10))
            assert worker.error is None and hanging.n_scored >= 1


def test_a_working_engine_is_never_taken_for_one_that_hangs() -> None:
    with (
        running_proxy(stall_timeout_s=2.5) as proxy,
        running_worker(proxy.backend_port) as worker,
        TeacherClient(server_port=proxy.frontend_port) as client,
    ):
        worker.engine.gate.clear()  # steps, without an answer
        future = client.submit([sequence(1, 2)], 20)
        threading.Event().wait(4.0)
        worker.engine.gate.set()
        future.result(timeout=5)
        assert proxy.latest_status.totals.workers_lost == 0


def test_the_request_that_the_engine_refuses_late_gets_the_error_and_others_go_on(proxy: Proxy) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with running_worker(proxy.backend_port, engine), TeacherClient(server_port=proxy.frontend_port) as client:
        asked = [[sequence(1, 2)], [sequence(3, 4), sequence(5, 98), sequence(6, 7)], [sequence(8, 9)]]
        futures = [client.submit(sequences, 20) for sequences in asked]
        for _ in range(5):
            assert engine.added.acquire(timeout=5)
        engine.gate.set()
        with pytest.raises(TeacherRequestError, match="the engine refused the request: 98"):
            futures[1].result(timeout=10)
        for i in (0, 2):
            assert is_answer_to(asked[i][0], futures[i].result(timeout=10))
        wait_until(lambda: not engine.has_work())
        assert client.status().totals.workers_lost == 0 and engine.n_scored <= 4


def test_a_process_whose_engine_hangs_ends_and_shows_where() -> None:
    """The watch is not of Python: it works while the main thread holds the GIL."""
    code = """
import sys, time
from tests._support.teacher_service import StopFlag
from tests._support.fake_worker import FakeEngine
from teacher.worker import Worker
class Engine(FakeEngine):
    def step(self):
        time.sleep(60)
Worker(Engine(), backend_port=int(sys.argv[1]), stall_timeout_s=1.0).run(StopFlag())
"""
    with running_proxy() as proxy, TeacherClient(server_port=proxy.frontend_port) as client:
        command = [sys.executable, "-c", code, str(proxy.backend_port)]
        worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            future = client.submit([sequence(1, 2)], 30)
            _, said = worker.communicate(timeout=20)
            assert worker.returncode == 1 and "Timeout" in said and "in step" in said
            with running_worker(proxy.backend_port):
                assert is_answer_to(sequence(1, 2), future.result(timeout=15))
        finally:
            worker.kill()
            worker.wait(timeout=10)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with running_proxy() as running:
        yield running


def test_nobody_scores_for_a_client_that_has_vanished(proxy: Proxy) -> None:
    """SIGKILL: it says nothing."""
    code = """
import sys, time
import numpy as np
from teacher import TeacherChanged, TeacherClient, TeacherProtocolError, TeacherSequence
client = TeacherClient(server_port=int(sys.argv[1]), timeout_s=600)
futures = [client.submit([TeacherSequence(np.array([1, i], np.int32), 1)]) for i in range(50)]
time.sleep(60)
"""
    engine = FakeEngine(capacity_tokens=20)
    engine.gate.clear()
    with running_worker(proxy.backend_port, engine), TeacherClient(server_port=proxy.frontend_port) as other:
        vanishing = subprocess.Popen([sys.executable, "-c", code, str(proxy.frontend_port)])
        try:
            wait_until(lambda: proxy.latest_status.queue_requests == 40)
        finally:
            vanishing.send_signal(signal.SIGKILL)
            vanishing.wait(timeout=10)
        wait_until(lambda: not proxy.latest_status.queue_requests and not engine.has_work(), 15)
        assert proxy.latest_status.totals.cancelled == 50
        engine.gate.set()
        assert is_answer_to(sequence(3, 4), other.submit([sequence(3, 4)], 20).result(timeout=5))
        assert engine.n_scored == 1


class Raw:
    """A client that speaks the protocol message by message."""

    def __init__(self, port: int, **options: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, request_id: int, sequences: list[TeacherSequence], timeout_s: float = 60.0) -> None:
        self.socket.send_multipart(protocol.encode_score(request_id, timeout_s, sequences))

    def next(self, timeout_s: float = 10.0) -> object:
        while True:
            assert self.socket.poll(1000 * timeout_s), "no message came"
            message = protocol.decode(self.socket.recv_multipart())
            if type(message).__name__ != "Probe":
                return message

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def raw_client(port: int, **options: int) -> Iterator[Raw]:
    client = Raw(port, **options)
    try:
        yield client
    finally:
        client.close()


class BulkyEngine(FakeEngine):
    """A megabyte a sequence."""

    def step(self) -> list[tuple[int, object]]:  # type: ignore[override]
        from teacher.records import ScoredSequence

        done = []
        for key, _ in super().step():
            logps_TK, ids_TK = np.zeros((1, 1 << 17), np.float32), np.zeros((1, 1 << 17), np.int32)
            done.append((key, ScoredSequence(logps_TK, ids_TK, np.zeros(1, np.float32))))
        return done  # type: ignore[return-value]


def test_a_client_that_does_not_read_is_given_no_more_and_holds_up_nobody(proxy: Proxy) -> None:
    engine = BulkyEngine(capacity_tokens=20)
    with running_worker(proxy.backend_port, engine), TeacherClient(server_port=proxy.frontend_port) as other:
        with raw_client(proxy.frontend_port, RCVHWM=1, RCVBUF=1 << 16) as lazy:
            for i in range(200):
                lazy.ask(i, [sequence(1, 2)])
            wait_until(lambda: proxy.latest_status.totals.answered > 0)
            scored = -1
            while scored != engine.n_scored:  # until nothing is dealt any more
                scored = engine.n_scored
                threading.Event().wait(0.5)
            assert scored < 100, "all was scored for who does not read"
            for _ in range(20):
                other.submit([sequence(3, 4)], 20).result(timeout=5)
            got = {lazy.next().request_id for _ in range(200)}  # type: ignore[attr-defined]
        assert got == set(range(200)), "and all of it, once, when it reads again"


def test_a_full_service_tells_clients_to_keep_their_requests() -> None:
    with running_proxy(max_queue_tokens=100) as proxy, raw_client(proxy.frontend_port) as greedy:
        for i in range(60):
            greedy.ask(i, [sequence(1, 2)])
        later = [greedy.next() for _ in range(10)]
        assert all(isinstance(message, RetryLater) and "100 tokens wait" in message.reason for message in later)
        assert [message.request_id for message in later] == list(range(50, 60))  # type: ignore[attr-defined]
        with TeacherClient(server_port=proxy.frontend_port) as client, running_worker(proxy.backend_port):
            futures = [client.submit([sequence(5, i % 90)], 20) for i in range(200)]
            for i, future in enumerate(futures):
                assert is_answer_to(sequence(5, i % 90), future.result(timeout=20))
            assert {greedy.next().request_id for _ in range(50)} == set(range(50))  # type: ignore[attr-defined]
            assert client.status().totals.put_off > 10


def test_a_client_with_more_requests_than_the_service_takes_is_not_taken_for_one_that_does_not_read() -> None:
    """It sends all of them at once, as soon as there is a service, which puts most of them off."""
    port = free_port()
    with TeacherClient(server_port=port) as client:
        futures = [client.submit([sequence(1, i % 90)], 60) for i in range(6000)]
        with running_proxy(port, max_queue_tokens=200) as proxy, running_worker(proxy.backend_port):
            for i, future in enumerate(futures):
                assert is_answer_to(sequence(1, i % 90), future.result(timeout=60))
            assert client.status().totals.cancelled == 0


def test_a_client_that_goes_while_its_questions_expire_takes_nobody_along(proxy: Proxy) -> None:
    for _ in range(3):
        with raw_client(proxy.frontend_port) as client:
            for request_id in (1, 2):
                client.socket.send_multipart(protocol.encode_hello(request_id, 0.3))
            client.ask(2, [sequence(1, 2)])
            threading.Event().wait(0.2)
        threading.Event().wait(0.4)
    with running_worker(proxy.backend_port), TeacherClient(server_port=proxy.frontend_port) as client:
        assert is_answer_to(sequence(1, 2), client.submit([sequence(1, 2)], 20).result(timeout=5))


def test_a_client_that_reconnects_is_known_and_its_open_requests_are_not_doubled(proxy: Proxy) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    name = b"c" + os.urandom(15)
    with (
        running_worker(proxy.backend_port, engine),
        raw_client(proxy.frontend_port, ROUTING_ID=name) as before,  # type: ignore[arg-type]
    ):
        before.ask(1, [sequence(1, 2)])
        assert engine.added.acquire(timeout=5)
        with raw_client(proxy.frontend_port, ROUTING_ID=name) as after:  # type: ignore[arg-type]
            after.ask(1, [sequence(1, 2)])
            after.ask(2, [sequence(3, 4)])
            assert engine.added.acquire(timeout=5)
            engine.gate.set()
            assert {after.next().request_id for _ in range(2)} == {1, 2}  # type: ignore[attr-defined]
    assert engine.n_scored == 2


def test_a_request_has_as_many_logprobs_and_bytes_as_it_asks_for(proxy: Proxy) -> None:
    asked = [sequence(1, 2, 3)]
    want = expected_answer(asked[0])
    with running_worker(proxy.backend_port), raw_client(proxy.frontend_port) as client:
        for top_k, wire_dtype in ((None, "float32"), (2, "float32"), (2, "float16"), (4, "float16")):
            client.socket.send_multipart(
                protocol.encode_score(1, 20.0, asked, top_k=top_k, wire_dtype=wire_dtype)  # type: ignore[arg-type]
            )
            message = client.next()
            assert isinstance(message, ScoreReply)
            got = message.scored[0]
            np.testing.assert_array_equal(got.topk_ids_TK, want.topk_ids_TK[:, :top_k])
            np.testing.assert_allclose(got.topk_logps_TK, want.topk_logps_TK[:, :top_k], rtol=1e-3)
            assert got.topk_logps_TK.dtype == wire_dtype and got.sampled_logps_T.dtype == np.float32
        refused = pytest.raises(TeacherRequestError, match="top_k=5, the teacher returns at most 4")
        with TeacherClient(server_port=proxy.frontend_port, top_k=5) as greedy, refused:
            greedy.submit(asked, 20).result(timeout=5)


def test_a_service_that_is_started_again_with_another_model_refuses_who_met_the_first() -> None:
    port, other = free_port(), replace(INFO, model_name="other")
    with TeacherClient(server_port=port) as client, TeacherClient(server_port=port) as newcomer:
        with running_proxy(port) as proxy, running_worker(proxy.backend_port):
            assert client.hello(10).model_name == "fake"
            client.submit([sequence(1, 2)], 20).result(timeout=10)
        with running_proxy(port) as proxy, running_worker(proxy.backend_port, FakeEngine(other)):
            with pytest.raises(TeacherChanged, match=r"serves other, .* met before: fake, .*start the service with"):
                client.submit([sequence(1, 2)], 20).result(timeout=15)
            assert is_answer_to(sequence(1, 2), newcomer.submit([sequence(1, 2)], 20).result(timeout=15))


def test_the_status_counts_what_happened(proxy: Proxy) -> None:
    with running_worker(proxy.backend_port), TeacherClient(server_port=proxy.frontend_port) as client:
        for i in range(5):
            client.submit([sequence(1, 2, i), sequence(3, i)], 20).result(timeout=5)
        with pytest.raises(TeacherRequestError):
            client.submit([sequence(1, 100)], 20).result(timeout=5)
        status = client.status()
        assert (status.model_name, status.n_logprobs, len(status.workers)) == ("fake", 4, 1)
        totals = status.totals
        assert (totals.answered, totals.answered_sequences, totals.answered_tokens, totals.refused) == (5, 10, 25, 1)
        assert totals.answered_bytes > 5 * 2 * 4 * 8
        assert [client.answered_tokens for client in status.clients] == [25]
        wait_until(lambda: client.status().workers[0].scored_tokens == 25)
        assert status.workers[0].name.endswith(f":{os.getpid()}")


def test_an_answer_that_is_none_ends_its_request_and_no_other(proxy: Proxy) -> None:
    with raw_client(proxy.backend_port) as worker, TeacherClient(server_port=proxy.frontend_port) as client:
        worker.socket.send_multipart(protocol.encode_ready(Ready(INFO, 1000, "careless:1", 60.0)))
        worker.next()
        futures = [client.submit([sequence(1, i)], 20) for i in (2, 3)]
        for cut in (1, 4):
            asked = worker.next()
            answer = protocol.encode_score_reply(asked.request_id, [expected_answer(asked.sequences[0])])  # type: ignore[attr-defined]
            worker.socket.send_multipart(answer[:cut])
        with pytest.raises(TeacherProtocolError, match="announces 3 arrays, 0 array frames"):
            futures[0].result(timeout=5)
        assert is_answer_to(sequence(1, 3), futures[1].result(timeout=5))
        assert not proxy.latest_status.totals.workers_lost


def test_a_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else(proxy: Proxy) -> None:
    with (
        running_worker(proxy.backend_port),
        TeacherClient(server_port=proxy.frontend_port) as client,
        raw_client(proxy.frontend_port) as huge,
    ):
        huge.socket.send(b"x" * (LIMITS.request_frame_bytes + 1))
        assert is_answer_to(sequence(1, 2), client.submit([sequence(1, 2)], 20).result(timeout=5))
