"""Sleep and wake-up of a service: real client, proxy and workers with the fake engine."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

import pytest

from teacher import TeacherClient, TeacherError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.__main__ import main
from teacher.engines.out_of_memory import ADVICE, explain, out_of_memory_explained
from teacher.engines.self_check import check_unchanged
from teacher.engines.vllm_sleep import check_checksums
from teacher.errors import TeacherAsleep, TeacherModelDamaged, TeacherOutOfMemory, TeacherWithoutWorker
from teacher.proxy import Proxy, client_side
from teacher.records import ScoredSequence
from teacher.wire import protocol
from teacher.wire.messages import AsleepSet, Ready, SetAsleep, Welcome
from tests._support.errors import raises
from tests._support.fake_worker import INFO, FakeEngine, RunningWorker, expected_scores, running_worker
from tests._support.teacher_requests import make_sequence, raw_peer
from tests._support.teacher_service import running_proxy
from tests._support.waiting import wait_until

SEQUENCE = make_sequence(1, 2, 3)
NAME = f"{socket.gethostname()}:{os.getpid()}"  # of all workers in this process


def assert_serves(client: TeacherClient) -> None:
    (scored,) = client.submit([SEQUENCE]).result(timeout=60)
    assert (scored.topk_ids_TK == expected_scores(SEQUENCE).topk_ids_TK).all()


def states(client: TeacherClient) -> tuple[str, list[str]]:
    status = client.status()
    return status.state, [worker.state for worker in status.workers]


def open_requests(client: TeacherClient) -> int:
    """Return the number of requests that the service has and has not answered."""
    status = client.status()
    return status.queue_requests + sum(worker.requests for worker in status.workers)


def state_becomes(client: TeacherClient, expected: str) -> None:
    wait_until(lambda: states(client)[0] == expected)


def test_messages_round_trip() -> None:
    assert protocol.decode(protocol.encode(SetAsleep(3, 2.5, asleep=True))) == SetAsleep(3, 2.5, asleep=True)
    assert protocol.decode(protocol.encode(AsleepSet(3, asleep=False, n_workers=4))) == AsleepSet(3, False, 4)
    ready = Ready(INFO, 100, "host:7", 60.0, has_sleep_mode=True, is_asleep=True)
    assert protocol.decode(protocol.encode(ready)) == ready


class TestService:
    def test_sleep_releases_all_workers_and_wake_restores_them(self, proxy: Proxy, client: TeacherClient) -> None:
        with running_worker(proxy.backend_port) as one, running_worker(proxy.backend_port) as two:
            assert client.sleep() == 2
            assert one.engine.is_asleep and two.engine.is_asleep
            assert states(client) == ("asleep", ["asleep", "asleep"])
            assert client.sleep() == 2, "a second request changes nothing"
            assert client.wake() == 2
            assert not one.engine.is_asleep and not two.engine.is_asleep
            assert states(client) == ("awake", ["awake", "awake"])
            assert_serves(client)

    def test_request_while_asleep_fails_at_once_with_remedy(self, proxy: Proxy, client: TeacherClient) -> None:
        with running_worker(proxy.backend_port):
            client.sleep()
            with raises(TeacherAsleep, address=client.address):
                client.submit([SEQUENCE]).result(timeout=60)
            assert client.hello(timeout_s=5).n_workers == 1
            client.wake()
            assert_serves(client)

    def test_open_requests_of_all_clients_are_finished_before_sleep(self, proxy: Proxy, client: TeacherClient) -> None:
        with (
            running_worker(proxy.backend_port, FakeEngine(capacity_tokens=3)) as worker,
            TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as other,
        ):
            worker.engine.gate.clear()
            futures = [user.submit([SEQUENCE]) for user in (client, other, client, other, client)]
            wait_until(lambda: open_requests(client) == 5)
            asleep = client.submit_sleep()
            state_becomes(client, "finishing")
            with raises(TeacherAsleep):
                other.submit([SEQUENCE]).result(timeout=60)
            assert not asleep.done() and not worker.engine.is_asleep
            worker.engine.gate.set()
            assert asleep.result(timeout=60) == 1 and worker.engine.is_asleep
            assert [len(future.result(timeout=60)) for future in futures] == [1] * 5

    def test_too_many_open_requests_are_deferred(
        self, proxy: Proxy, client: TeacherClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client that sends requests without end does not fill the proxy's memory."""
        monkeypatch.setattr(client_side, "_MAX_SLEEP_REQUESTS", 2)
        with running_worker(proxy.backend_port) as worker:
            worker.engine.gate.clear()
            scored = client.submit([SEQUENCE])
            open_requests = [client.submit_sleep(timeout_s=20) for _ in range(2)]
            state_becomes(client, "finishing")
            with raises(TeacherTimeout, operation="sleep", stage="deferred"):
                client.submit_sleep(timeout_s=0.5).result(timeout=60)
            worker.engine.gate.set()
            assert [request.result(timeout=60) for request in open_requests] == [1, 1]
            assert len(scored.result(timeout=0)) == 1

    def test_requests_open_until_deadline_keep_service_awake(self, proxy: Proxy, client: TeacherClient) -> None:
        with running_worker(proxy.backend_port) as worker:
            worker.engine.gate.clear()
            future = client.submit([SEQUENCE])
            with raises(TeacherTimeout, operation="sleep", stage="finishing"):
                client.sleep(timeout_s=1.0)
            worker.engine.gate.set()
            assert len(future.result(timeout=60)) == 1
            assert_serves(client)

    def test_sleep_of_lost_client_does_not_happen(self, proxy: Proxy, client: TeacherClient) -> None:
        with running_worker(proxy.backend_port) as worker:
            worker.engine.gate.clear()
            future = client.submit([SEQUENCE])
            assert worker.engine.added.acquire(timeout=60)
            with TeacherClient(server_port=proxy.frontend_port) as lost:
                lost.submit_sleep()
                state_becomes(client, "finishing")
            state_becomes(client, "awake")
            worker.engine.gate.set()
            assert len(future.result(timeout=60)) == 1

    def test_latest_request_counts(self, proxy: Proxy, client: TeacherClient) -> None:
        with running_worker(proxy.backend_port) as worker:
            worker.engine.sleep_gate.clear()
            asleep = client.submit_sleep()
            state_becomes(client, "falling asleep")
            awake = client.submit_wake()
            with raises(TeacherUnavailable, operation="sleep", workers=()):
                asleep.result(timeout=60)
            worker.engine.sleep_gate.set()
            assert awake.result(timeout=60) == 1
            assert_serves(client)

    def test_worker_without_sleep_mode_refuses_sleep_with_option(self, proxy: Proxy, client: TeacherClient) -> None:
        engine = FakeEngine()
        engine.has_sleep_mode = False
        with running_worker(proxy.backend_port) as capable, running_worker(proxy.backend_port, engine):
            with raises(TeacherRequestError, workers=(NAME,), options=("--sleep-mode",)):
                client.sleep()
            assert not capable.engine.is_asleep
            assert_serves(client)

    def test_slow_worker_is_named_at_deadline_and_not_taken_for_hung(self, proxy: Proxy, client: TeacherClient) -> None:
        with running_worker(proxy.backend_port) as worker:
            worker.engine.sleep_gate.clear()
            late = client.submit_sleep(timeout_s=2.0)
            state_becomes(client, "falling asleep")
            with raises(TeacherTimeout, stage="changing", workers=(NAME,)):
                late.result(timeout=60)
            worker.engine.sleep_gate.set()
            state_becomes(client, "asleep")
            client.wake()
            assert client.status().totals.workers_lost == 0
            assert_serves(client)


class TestWorkers:
    def test_worker_that_fails_to_wake_is_named_and_others_serve(self, proxy: Proxy, client: TeacherClient) -> None:
        broken = FakeEngine()
        broken.wake_error = TeacherError("the weights of the teacher are not the same")
        with running_worker(proxy.backend_port), running_worker(proxy.backend_port, broken) as worker:
            client.sleep()
            with raises(TeacherUnavailable, operation="wake-up", workers=(NAME,)):
                client.wake()
            worker.thread.join(timeout=60)
            assert worker.error is broken.wake_error
            assert states(client) == ("awake", ["awake"])
            assert_serves(client)

    def test_only_worker_that_fails_to_wake_leaves_no_worker(self, proxy: Proxy, client: TeacherClient) -> None:
        broken = FakeEngine()
        broken.wake_error = TeacherError("the weights of the teacher are not the same")
        with running_worker(proxy.backend_port, broken):
            client.sleep()
            with raises(TeacherUnavailable, operation="wake-up", workers=(NAME,)):
                client.wake()
            assert client.status().workers == ()

    def test_worker_that_joins_sleeping_service_sleeps_before_it_serves(
        self, proxy: Proxy, client: TeacherClient
    ) -> None:
        incapable = FakeEngine()
        incapable.has_sleep_mode = False
        with running_worker(proxy.backend_port) as first:
            client.sleep()
            with running_worker(proxy.backend_port) as second, running_worker(proxy.backend_port, incapable) as third:
                wait_until(lambda: second.engine.is_asleep)
                state_becomes(client, "asleep")
                assert isinstance(third.error, TeacherRequestError) and third.error.options == ("--sleep-mode",)
                assert client.wake() == 2
                assert not first.engine.is_asleep and not second.engine.is_asleep

    def test_wake_waits_for_first_worker_until_deadline(self, proxy: Proxy, client: TeacherClient) -> None:
        assert client.sleep() == 0
        with raises(TeacherWithoutWorker, operation="wake-up"):
            client.wake(timeout_s=0.5)
        awake = client.submit_wake()
        with running_worker(proxy.backend_port):
            assert awake.result(timeout=60) == 1
            assert_serves(client)

    def test_restarted_proxy_takes_sleep_from_workers_and_keeps_devices_free(self) -> None:
        sleeping = Ready(INFO, 1000, "raw:1", 0.0, has_sleep_mode=True, is_asleep=True)
        with (
            running_proxy() as proxy,
            TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as client,
            running_worker(proxy.backend_port) as awake,
            raw_peer(proxy.backend_port) as worker,
        ):
            worker.send(sleeping)
            assert isinstance(worker.receive(), Welcome)
            wait_until(lambda: awake.engine.is_asleep)
            assert states(client) == ("asleep", ["asleep", "asleep"])
            with raises(TeacherAsleep):
                client.submit([SEQUENCE]).result(timeout=60)
            woken = client.submit_wake()
            command = worker.receive()
            assert isinstance(command, SetAsleep) and not command.asleep
            worker.send(AsleepSet(command.request_id, asleep=False, n_workers=1))
            assert woken.result(timeout=60) == 2

    def test_state_outlives_reconnection(self) -> None:
        with running_proxy() as proxy:
            port, backend_port = proxy.frontend_port, proxy.backend_port
            worker = RunningWorker(backend_port, FakeEngine())
            assert worker.settled.wait(timeout=60)
            with TeacherClient(server_port=port, timeout_s=20) as client:
                client.sleep()
        try:
            with running_proxy(port, backend_port), TeacherClient(server_port=port, timeout_s=20) as client:
                state_becomes(client, "asleep")
                assert worker.engine.is_asleep and client.wake() == 1
                assert_serves(client)
        finally:
            worker.stop()


def test_commands_sleep_and_wake_change_state_and_others_show_it(
    proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str, *more: str) -> tuple[int, str]:
        code = main([command, "--port", str(proxy.frontend_port), *more])
        return code, "".join(capsys.readouterr())

    with running_worker(proxy.backend_port) as worker:
        code, shown = run("sleep")
        assert code == 0 and "1 workers sleep" in shown and worker.engine.is_asleep
        code, shown = run("status")
        assert code == 0 and "SLEEPS: refuses requests until `python -m teacher wake`" in shown
        assert json.loads(run("status", "--json")[1])["state"] == "asleep"
        code, shown = run("check")
        assert code == 1 and "the teacher sleeps" in shown
        code, shown = run("wake")
        assert code == 0 and "1 workers are awake and verified" in shown
        assert run("check")[0] == 0


class TestVerification:
    def test_check_unchanged_uniform_distribution_is_refused(self) -> None:
        import numpy as np

        ids_TK = np.arange(8, dtype=np.int32).reshape(4, 2)
        logps_TK = np.tile(np.log([0.7, 0.2]).astype(np.float32), (4, 1))
        before = ScoredSequence(logps_TK, ids_TK, np.float32([-1.0, -np.inf, -2.0, -3.0]))
        check_unchanged(before, before, 0.0)
        for wrong in (np.log(0.5), np.nan):
            after = ScoredSequence(np.full_like(logps_TK, wrong), ids_TK, before.sampled_logps_T)
            with pytest.raises(RuntimeError):
                check_unchanged(before, after, 0.05)

    def test_check_checksums_names_changed_tensors(self) -> None:
        check_checksums([{"a": 1, "b": 2}], [{"a": 1, "b": 2}])
        with raises(TeacherModelDamaged, tensors=("b of rank 1",)):
            check_checksums([{"a": 1, "b": 2}] * 2, [{"a": 1, "b": 2}, {"a": 1, "b": 3}])


def _raise(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


class TestOutOfMemory:
    @pytest.mark.parametrize(
        "text",
        ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA Error: out of memory at cumem_allocator.cpp:62"],
    )
    def test_explained_error_names_phase_sizes_and_options(self, text: str) -> None:
        sizes = {"weights": 2**20, "KV cache": 3 << 30}
        with (
            raises(TeacherOutOfMemory, phase="engine step", sizes=sizes),
            out_of_memory_explained("engine step", sizes),
        ):
            _raise(RuntimeError(text))()

    def test_error_of_start_up_check_caused_by_it_is_explained(self) -> None:
        error = TeacherError("vLLM failed the start-up check")
        error.__cause__ = RuntimeError("CUDA out of memory")
        with raises(TeacherOutOfMemory, phase="start"), out_of_memory_explained("start", {}):
            _raise(error)()

    def test_other_errors_pass_unchanged(self) -> None:
        error = RuntimeError("an illegal memory access was encountered")
        with pytest.raises(RuntimeError) as caught, out_of_memory_explained("start", {}):
            _raise(error)()
        assert caught.value is error

    def test_explain_wake_up_advises_to_release_devices_first(self) -> None:
        error = explain(MemoryError("no"), "wake-up", {})
        assert error.phase == "wake-up" and ADVICE["wake-up"] in error.remedy
