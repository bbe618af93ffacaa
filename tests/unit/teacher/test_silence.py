"""Silence of workers: heartbeats between results, and the proxy's limit above the worker's own limit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from teacher import TeacherClient
from teacher import worker as worker_module
from teacher.proxy import liveness
from teacher.proxy.proxy import STALL_TIMEOUT_S
from teacher.proxy.status_tracker import StatusTracker
from teacher.wire import protocol
from teacher.wire.messages import AsleepSet, Heartbeat, Message, Ready, Score, ScoreReply, SetAsleep, Welcome
from teacher.wire.sockets import WORKER_HEARTBEAT
from teacher.worker import Worker
from tests._support.fake_worker import INFO, FakeEngine, running_worker
from tests._support.ports import free_port
from tests._support.teacher_requests import make_sequence, raw_peer
from tests._support.teacher_service import running_proxy
from tests._support.waiting import wait_until


def test_liveness_allows_longer_silence_than_step_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silence of a worker includes the encoding of its replies. Every worker has its own limit."""
    silent_s = 0.0
    monkeypatch.setattr(StatusTracker, "silence_s", lambda *_: silent_s)
    monkeypatch.setattr(liveness, "CHECK_INTERVAL_S", 0.05)
    with (
        running_proxy() as proxy,
        running_worker(proxy.backend_port, stall_timeout_s=5 * STALL_TIMEOUT_S),
        raw_peer(proxy.backend_port) as short_limit,
        raw_peer(proxy.backend_port) as no_limit,
    ):
        for worker, stall_timeout_s in ((short_limit, 0.5 * STALL_TIMEOUT_S), (no_limit, 0.0)):
            worker.send(Ready(INFO, 1000, "raw:1", stall_timeout_s))
            assert isinstance(worker.receive(), Welcome)
        for silence, n_lost in ((1.4, 0), (1.6, 2), (1.4 * 5, 2)):
            silent_s, looked_at = silence * STALL_TIMEOUT_S, proxy.latest_status_at
            wait_until(lambda looked_at=looked_at: proxy.latest_status_at > looked_at + 0.2)  # type: ignore[misc]
            assert proxy.latest_status.totals.workers_lost == n_lost
        assert len(proxy.latest_status.workers) == 1
        silent_s = 1.6 * 5 * STALL_TIMEOUT_S
        wait_until(lambda: proxy.latest_status.totals.workers_lost > 2)  # it registers again, and is removed again
        silent_s = 0.0


def test_liveness_allows_silence_until_deadline_of_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying the weights to the host takes longer than a step."""
    silent_s = 0.0
    monkeypatch.setattr(StatusTracker, "silence_s", lambda *_: silent_s)
    monkeypatch.setattr(liveness, "CHECK_INTERVAL_S", 0.05)
    ready = Ready(INFO, 1000, "raw:1", STALL_TIMEOUT_S, has_sleep_mode=True)
    with (
        running_proxy() as proxy,
        raw_peer(proxy.backend_port) as worker,
        TeacherClient(server_port=proxy.frontend_port) as client,
    ):
        worker.send(ready)
        assert isinstance(worker.receive(), Welcome)
        asleep = client.submit_sleep(timeout_s=600)
        command = worker.receive()
        assert isinstance(command, SetAsleep) and 500 < command.timeout_s <= 600
        silent_s, looked_at = 5 * STALL_TIMEOUT_S, proxy.latest_status_at
        wait_until(lambda: proxy.latest_status_at > looked_at + 0.2)
        assert proxy.latest_status.workers[0].state == "falling asleep"
        silent_s = 0.0
        worker.send(AsleepSet(command.request_id, asleep=True, n_workers=1))
        assert asleep.result(timeout=60) == 1
        silent_s = 5 * STALL_TIMEOUT_S  # no heartbeats while it sleeps
        wait_until(lambda: proxy.latest_status.totals.workers_lost == 1)


def test_worker_sends_heartbeats_between_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine(FakeEngine):
        def step(self) -> list[tuple[int, object]]:  # type: ignore[override]
            return [done for _ in list(self._waiting) for done in super(Engine, self).step()]

    clock, sent, encode = [100.0], [], protocol.encode

    def encode_slowly(message: Message) -> list[protocol.Frame]:
        clock[0] += 2 * WORKER_HEARTBEAT.interval_s if isinstance(message, ScoreReply) else 0.0
        return encode(message)

    worker = Worker(Engine(), backend_port=free_port())
    try:
        monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        monkeypatch.setattr(protocol, "encode", encode_slowly)
        monkeypatch.setattr(worker._connection, "send", lambda frames: sent.append(type(protocol.decode(frames))))
        worker._receive(protocol.encode(Welcome()))
        for number in range(4):
            worker._receive(protocol.encode(Score(number, 60.0, [make_sequence(1, number)])))
        worker._jobs.fill_engine()
        worker._step()
    finally:
        worker._connection.close(0)
    assert sent == [Heartbeat, ScoreReply] * 4
