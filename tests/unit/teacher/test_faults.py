"""Proxy and workers with peers that hang, are lost, violate the protocol, or do not read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from teacher import TeacherChanged, TeacherClient, TeacherProtocolError, TeacherRequestError, TeacherSequence
from teacher import worker as worker_module
from teacher.proxy import Proxy, liveness
from teacher.records import ScoredSequence
from teacher.wire import protocol
from teacher.wire.limits import LIMITS
from teacher.wire.messages import Hello, Ready, RetryLater, Score, ScoreReply
from teacher.wire.sockets import WORKER_HEARTBEAT
from tests._support.errors import raises
from tests._support.fake_worker import INFO, FakeEngine, expected_scores, running_worker
from tests._support.ports import free_port
from tests._support.teacher_requests import make_sequence, raw_peer
from tests._support.teacher_service import running_proxy
from tests._support.waiting import wait_until


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the intervals of the proxy's checks, which refresh the status, and of the workers' heartbeats."""
    monkeypatch.setattr(liveness, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(worker_module, "WORKER_HEARTBEAT", replace(WORKER_HEARTBEAT, interval_s=0.05))


def is_scored(sequence: TeacherSequence, results: list[object]) -> bool:
    return np.array_equal(results[0].topk_ids_TK, expected_scores(sequence).topk_ids_TK)  # type: ignore[attr-defined]


class HangingEngine(FakeEngine):
    """Engine whose steps block until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def step(self) -> list[tuple[int, object]]:  # type: ignore[override]
        assert self.goes_on.wait(timeout=60)
        return super().step()  # type: ignore[return-value]


def test_hanging_worker_is_replaced_and_may_return() -> None:
    with running_proxy(stall_timeout_s=0.8) as proxy, TeacherClient(server_port=proxy.frontend_port) as client:
        hanging = HangingEngine()
        with running_worker(proxy.backend_port, hanging) as worker:
            futures = [client.submit([make_sequence(1, i)], 20) for i in range(10)]
            assert hanging.added.acquire(timeout=60)
            with running_worker(proxy.backend_port):
                for i, future in enumerate(futures):
                    assert is_scored(make_sequence(1, i), future.result(timeout=60))
                assert proxy.latest_status.totals.workers_lost == 1
                assert client.hello().n_workers == 1
            hanging.goes_on.set()
            wait_until(lambda: len(proxy.latest_status.workers) == 1)
            assert is_scored(make_sequence(7, 8), client.submit([make_sequence(7, 8)], 20).result(timeout=60))
            assert worker.error is None and hanging.n_scored >= 1


def test_busy_worker_is_not_removed() -> None:
    with (
        running_proxy(stall_timeout_s=0.8) as proxy,
        running_worker(proxy.backend_port) as worker,
        TeacherClient(server_port=proxy.frontend_port) as client,
    ):
        worker.engine.gate.clear()  # steps without results
        future = client.submit([make_sequence(1, 2)], 20)
        threading.Event().wait(1.5)  # longer than the allowed silence of 1.2 s
        worker.engine.gate.set()
        future.result(timeout=60)
        assert proxy.latest_status.totals.workers_lost == 0


def test_late_engine_refusal_fails_one_request(proxy: Proxy) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with running_worker(proxy.backend_port, engine), TeacherClient(server_port=proxy.frontend_port) as client:
        requested = [
            [make_sequence(1, 2)],
            [make_sequence(3, 4), make_sequence(5, 98), make_sequence(6, 7)],
            [make_sequence(8, 9)],
        ]
        futures = [client.submit(sequences, 20) for sequences in requested]
        for _ in range(5):
            assert engine.added.acquire(timeout=60)
        engine.gate.set()
        with raises(TeacherRequestError, sequence=1):
            futures[1].result(timeout=60)
        for i in (0, 2):
            assert is_scored(requested[i][0], futures[i].result(timeout=60))
        wait_until(lambda: not engine.has_work())
        assert client.status().totals.workers_lost == 0 and engine.n_scored <= 4


def test_watchdog_ends_process_with_stack() -> None:
    """The watchdog is a C thread, so it works while the main thread holds the GIL."""
    code = """
import sys, time
from tests._support.teacher_service import StopFlag
from tests._support.fake_worker import FakeEngine
from teacher.worker import Worker
class Engine(FakeEngine):
    def step(self):
        time.sleep(3600)
Worker(Engine(), backend_port=int(sys.argv[1]), stall_timeout_s=0.5).run(StopFlag())
"""
    with running_proxy() as proxy, TeacherClient(server_port=proxy.frontend_port) as client:
        command = [sys.executable, "-c", code, str(proxy.backend_port)]
        worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            future = client.submit([make_sequence(1, 2)], 30)
            _, stderr = worker.communicate(timeout=60)
            assert worker.returncode == 1 and "Timeout" in stderr and "in step" in stderr
            with running_worker(proxy.backend_port):
                assert is_scored(make_sequence(1, 2), future.result(timeout=60))
        finally:
            worker.kill()
            worker.wait(timeout=60)


def test_requests_of_killed_client_are_canceled(proxy: Proxy) -> None:
    """The client is killed with SIGKILL, so it sends no cancellation."""
    code = """
import sys, time
import numpy as np
from teacher import TeacherClient, TeacherSequence
client = TeacherClient(server_port=int(sys.argv[1]), timeout_s=600)
futures = [client.submit([TeacherSequence(np.array([1, i], np.int32), 1)]) for i in range(50)]
time.sleep(3600)
"""
    engine = FakeEngine(capacity_tokens=20)
    engine.gate.clear()
    with running_worker(proxy.backend_port, engine), TeacherClient(server_port=proxy.frontend_port) as other:
        victim = subprocess.Popen([sys.executable, "-c", code, str(proxy.frontend_port)])
        try:
            wait_until(lambda: proxy.latest_status.queue_requests == 40)
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.wait(timeout=60)
        wait_until(lambda: not proxy.latest_status.queue_requests and not engine.has_work(), 15)
        assert proxy.latest_status.totals.canceled == 50
        engine.gate.set()
        assert is_scored(make_sequence(3, 4), other.submit([make_sequence(3, 4)], 20).result(timeout=60))
        assert engine.n_scored == 1


class BulkyEngine(FakeEngine):
    """Engine with results of one megabyte per sequence."""

    def step(self) -> list[tuple[int, object]]:  # type: ignore[override]
        done = []
        for key, _ in super().step():
            logps_TK, ids_TK = np.zeros((1, 1 << 17), np.float32), np.zeros((1, 1 << 17), np.int32)
            done.append((key, ScoredSequence(logps_TK, ids_TK, np.zeros(1, np.float32))))
        return done  # type: ignore[return-value]


def test_client_that_does_not_read_is_paused(proxy: Proxy) -> None:
    engine = BulkyEngine(capacity_tokens=20)
    with running_worker(proxy.backend_port, engine), TeacherClient(server_port=proxy.frontend_port) as other:
        with raw_peer(proxy.frontend_port, RCVHWM=1, RCVBUF=1 << 16) as lazy:
            for i in range(200):
                lazy.submit(i, [make_sequence(1, 2)])
            wait_until(lambda: proxy.latest_status.totals.scored > 0)
            scored = -1
            while scored != engine.n_scored:  # until no more requests are assigned
                scored = engine.n_scored
                threading.Event().wait(0.2)
            assert scored < 100, "requests of a client that does not read were assigned"
            for _ in range(20):
                other.submit([make_sequence(3, 4)], 20).result(timeout=60)
            got = {lazy.receive().request_id for _ in range(200)}  # type: ignore[attr-defined]
        assert got == set(range(200)), "every reply arrives once when the client reads again"


def test_full_queue_sends_retry_later() -> None:
    with running_proxy(max_queue_tokens=100) as proxy, raw_peer(proxy.frontend_port) as greedy:
        for i in range(60):
            greedy.submit(i, [make_sequence(1, 2)])
        later = [greedy.receive() for _ in range(10)]
        assert all(
            isinstance(message, RetryLater) and "100 tokens and support ids wait" in message.reason for message in later
        )
        assert [message.request_id for message in later] == list(range(50, 60))  # type: ignore[attr-defined]
        with TeacherClient(server_port=proxy.frontend_port) as client, running_worker(proxy.backend_port):
            futures = [client.submit([make_sequence(5, i % 90)], 20) for i in range(200)]
            for i, future in enumerate(futures):
                assert is_scored(make_sequence(5, i % 90), future.result(timeout=60))
            assert {greedy.receive().request_id for _ in range(50)} == set(range(50))  # type: ignore[attr-defined]
            assert client.status().totals.retried_later > 10


def test_client_above_queue_limit_is_served() -> None:
    """The client sends all requests at once, and the proxy sends most of them back."""
    port = free_port()
    with TeacherClient(server_port=port) as client:
        futures = [client.submit([make_sequence(1, i % 90)], 60) for i in range(2000)]
        with running_proxy(port, max_queue_tokens=200) as proxy, running_worker(proxy.backend_port):
            for i, future in enumerate(futures):
                assert is_scored(make_sequence(1, i % 90), future.result(timeout=60))
            assert client.status().totals.canceled == 0


def test_client_lost_during_expiry_is_harmless(proxy: Proxy) -> None:
    for _ in range(3):
        with raw_peer(proxy.frontend_port) as client:
            for request_id in (1, 2):
                client.send(Hello(request_id, 0.15))
            client.submit(2, [make_sequence(1, 2)])
            threading.Event().wait(0.1)
        threading.Event().wait(0.15)
    with running_worker(proxy.backend_port), TeacherClient(server_port=proxy.frontend_port) as client:
        assert is_scored(make_sequence(1, 2), client.submit([make_sequence(1, 2)], 20).result(timeout=60))


def test_reconnected_client_requests_are_not_duplicated(proxy: Proxy) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    name = b"c" + os.urandom(15)
    with (
        running_worker(proxy.backend_port, engine),
        raw_peer(proxy.frontend_port, ROUTING_ID=name) as before,
    ):
        before.submit(1, [make_sequence(1, 2)])
        assert engine.added.acquire(timeout=60)
        with raw_peer(proxy.frontend_port, ROUTING_ID=name) as after:
            after.submit(1, [make_sequence(1, 2)])
            after.submit(2, [make_sequence(3, 4)])
            assert engine.added.acquire(timeout=60)
            engine.gate.set()
            assert {after.receive().request_id for _ in range(2)} == {1, 2}  # type: ignore[attr-defined]
    assert engine.n_scored == 2


def test_reply_has_requested_top_k_and_dtype(proxy: Proxy) -> None:
    requested = [make_sequence(1, 2, 3)]
    want = expected_scores(requested[0])
    with running_worker(proxy.backend_port), raw_peer(proxy.frontend_port) as client:
        for top_k, wire_dtype in ((0, "float32"), (2, "float32"), (2, "float16"), (4, "float16")):
            client.send(Score(1, 20.0, requested, top_k=top_k, wire_dtype=wire_dtype))
            message = client.receive()
            assert isinstance(message, ScoreReply)
            got = message.scored[0]
            np.testing.assert_array_equal(got.topk_ids_TK, want.topk_ids_TK[:, : top_k or None])
            np.testing.assert_allclose(got.topk_logps_TK, want.topk_logps_TK[:, : top_k or None], rtol=1e-3)
            assert got.topk_logps_TK.dtype == wire_dtype and got.sampled_logps_T.dtype == np.float32
        refused = raises(TeacherRequestError, argument="top_k")
        with TeacherClient(server_port=proxy.frontend_port, top_k=5) as greedy, refused:
            greedy.submit(requested, 20).result(timeout=60)


def test_restart_with_other_model_refuses_known_client() -> None:
    port, other = free_port(), replace(INFO, model_name="other")
    with TeacherClient(server_port=port) as client, TeacherClient(server_port=port) as newcomer:
        with running_proxy(port) as proxy, running_worker(proxy.backend_port):
            assert client.hello(10).model_name == "fake"
            client.submit([make_sequence(1, 2)], 20).result(timeout=60)
        with running_proxy(port) as proxy, running_worker(proxy.backend_port, FakeEngine(other)):
            with raises(TeacherChanged, address=client.address):
                client.submit([make_sequence(1, 2)], 20).result(timeout=60)
            assert is_scored(make_sequence(1, 2), newcomer.submit([make_sequence(1, 2)], 20).result(timeout=60))


def test_status_counts_outcomes(proxy: Proxy) -> None:
    with running_worker(proxy.backend_port), TeacherClient(server_port=proxy.frontend_port) as client:
        for i in range(5):
            client.submit([make_sequence(1, 2, i), make_sequence(3, i)], 20).result(timeout=60)
        with pytest.raises(TeacherRequestError):
            client.submit([make_sequence(1, 100)], 20).result(timeout=60)
        status = client.status()
        assert (status.model_name, status.n_logprobs, len(status.workers)) == ("fake", 4, 1)
        totals = status.totals
        assert (totals.scored, totals.scored_sequences, totals.scored_tokens, totals.refused) == (5, 10, 25, 1)
        assert totals.reply_bytes > 5 * 2 * 4 * 8
        assert [client.scored_tokens for client in status.clients] == [25]
        wait_until(lambda: client.status().workers[0].scored_tokens == 25)
        assert status.workers[0].name.endswith(f":{os.getpid()}")


def test_invalid_reply_fails_its_request_only(proxy: Proxy) -> None:
    with raw_peer(proxy.backend_port) as worker, TeacherClient(server_port=proxy.frontend_port) as client:
        worker.send(Ready(INFO, 1000, "careless:1", 60.0))
        worker.receive()
        futures = [client.submit([make_sequence(1, i)], 20) for i in (2, 3)]
        for cut in (1, 4):
            requested = worker.receive()
            answer = protocol.encode(ScoreReply(requested.request_id, [expected_scores(requested.sequences[0])]))  # type: ignore[attr-defined]
            worker.socket.send_multipart(answer[:cut])
        with raises(TeacherProtocolError, entry="arrays"):
            futures[0].result(timeout=60)
        assert is_scored(make_sequence(1, 3), futures[1].result(timeout=60))
        assert not proxy.latest_status.totals.workers_lost


def test_oversized_frame_disconnects_its_sender_only(proxy: Proxy) -> None:
    with (
        running_worker(proxy.backend_port),
        TeacherClient(server_port=proxy.frontend_port) as client,
        raw_peer(proxy.frontend_port) as huge,
    ):
        huge.socket.send(b"x" * (LIMITS.request_frame_bytes + 1))
        assert is_scored(make_sequence(1, 2), client.submit([make_sequence(1, 2)], 20).result(timeout=60))
