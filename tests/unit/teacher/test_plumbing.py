"""Client, proxy and workers over real sockets, with the fake engine of `fake_worker`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import zmq

from teacher import (
    ScoredSequence,
    TeacherClient,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherSequence,
    TeacherTimeout,
    TeacherUnavailable,
)
from teacher.errors import TeacherClosed, TeacherSetupError, TeacherUnreachable, TeacherWithoutWorker
from teacher.proxy import Proxy
from teacher.wire import protocol
from teacher.wire.limits import LIMITS, PROTOCOL_VERSION
from teacher.wire.messages import Failure, Hello, ScoreReply, Welcome
from teacher.worker import Worker
from tests._support.errors import raises
from tests._support.fake_worker import OTHER_INFO, FakeEngine, expected_scores, running_worker
from tests._support.ports import free_port
from tests._support.teacher_requests import make_sequence
from tests._support.teacher_service import StopFlag, running_proxy
from tests._support.waiting import wait_until

NAME = f"{socket.gethostname()}:{os.getpid()}"  # of all workers in this process


def assert_scored(answers: list[ScoredSequence], sequences: list[TeacherSequence]) -> None:
    for got, sequence in zip(answers, sequences, strict=True):
        want = expected_scores(sequence)
        np.testing.assert_array_equal(got.topk_ids_TK, want.topk_ids_TK)
        np.testing.assert_array_equal(got.topk_logps_TK, want.topk_logps_TK)
        np.testing.assert_array_equal(got.sampled_logps_T, want.sampled_logps_T)


def test_hello_returns_model_and_workers(proxy: Proxy, client: TeacherClient) -> None:
    with running_worker(proxy.backend_port), running_worker(proxy.backend_port):
        info = client.hello()
    assert (info.model_name, info.vocab_size, info.n_logprobs, info.max_model_len) == ("fake", 100, 4, 32)
    assert info.eos_token_ids == (1, 7)
    assert (info.protocol_version, info.n_workers) == (PROTOCOL_VERSION, 2)


def test_submit_from_many_threads_returns_own_results(proxy: Proxy, client: TeacherClient) -> None:
    rng = np.random.default_rng(0)
    requests = [
        [make_sequence(*rng.integers(0, 90, rng.integers(2, 20)).tolist()) for _ in range(rng.integers(1, 4))]
        for _ in range(300)
    ]
    with running_worker(proxy.backend_port) as worker, ThreadPoolExecutor(8) as callers:
        worker.engine.gate.clear()
        futures = list(callers.map(client.submit, requests))
        worker.engine.gate.set()
        for future, sequences in zip(futures, requests, strict=True):
            assert_scored(future.result(timeout=60), sequences)


def test_results_arrive_in_order_of_completion(proxy: Proxy, client: TeacherClient) -> None:
    order: list[int] = []
    with running_worker(proxy.backend_port) as worker:
        worker.engine.gate.clear()
        futures = [client.submit([make_sequence(1, i)]) for i in range(3)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: order.append(i))
            assert worker.engine.added.acquire(timeout=60)
        worker.engine.gate.set()
        for i, future in enumerate(futures):
            assert_scored(future.result(timeout=60), [make_sequence(1, i)])
    assert order == [2, 1, 0]


def test_late_reply_is_dropped(proxy: Proxy, client: TeacherClient) -> None:
    with running_worker(proxy.backend_port) as worker:
        worker.engine.gate.clear()
        late = client.submit([make_sequence(1, 2)], timeout_s=0.8)
        with raises(TeacherTimeout, stage="scoring", workers=(NAME,)):
            late.result(timeout=60)
        worker.engine.gate.set()
        sequences = [make_sequence(7, 8, 9)]
        assert_scored(client.submit(sequences).result(timeout=60), sequences)


def test_silent_proxy_ends_in_timeout() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        with (
            TeacherClient(server_port=port) as client,
            raises(TeacherTimeout, stage="sent", address=client.address),
        ):
            client.submit([make_sequence(1, 2)], timeout_s=0.5).result(timeout=60)


def test_invalid_request_fails_alone(proxy: Proxy, client: TeacherClient) -> None:
    good = [make_sequence(1, 2, 3)]
    with running_worker(proxy.backend_port) as worker:
        worker.engine.gate.clear()
        futures = [
            client.submit(good),
            client.submit([make_sequence(1, 2), make_sequence(1, 100)]),
            client.submit(good),
        ]
        worker.engine.gate.set()
        with raises(TeacherRequestError, sequence=1, argument="token_ids"):
            futures[1].result(timeout=60)
        for future in (futures[0], futures[2], client.submit(good)):
            assert_scored(future.result(timeout=60), good)
        assert worker.thread.is_alive()


def test_submit_invalid_arguments_fail_through_future(client: TeacherClient) -> None:
    for bad in ([], [make_sequence(1)], [TeacherSequence(np.zeros(3, np.float64), 1)]):
        with pytest.raises(TeacherRequestError):
            client.submit(bad).result(timeout=60)
    with raises(TeacherRequestError, argument="timeout_s"):
        client.submit([make_sequence(1, 2)], timeout_s=float("nan")).result(timeout=60)


def test_request_without_worker_waits_until_deadline(proxy: Proxy, client: TeacherClient) -> None:
    expiring, waiting = client.submit([make_sequence(1, 2)], timeout_s=0.8), client.submit([make_sequence(3, 4)])
    with raises(TeacherWithoutWorker, operation="scoring 1 sequences"):
        expiring.result(timeout=60)
    with raises(TeacherWithoutWorker, operation="hello"):
        client.hello(timeout_s=0.8)
    with running_worker(proxy.backend_port):
        assert_scored(waiting.result(timeout=60), [make_sequence(3, 4)])


def test_client_without_service_is_unavailable() -> None:
    port = free_port()
    unreachable = raises(TeacherUnreachable, operation="hello", address=f"tcp://127.0.0.1:{port}", refusal="")
    with TeacherClient(server_port=port) as client, unreachable:
        client.hello(timeout_s=0.3)
    with raises(TeacherSetupError, address="tcp://127.0.0.1:99999"):
        TeacherClient(server_port=99999)


def test_client_uses_restarted_service() -> None:
    port = free_port()
    with TeacherClient(server_port=port, timeout_s=20) as client:
        with running_proxy(port) as proxy, running_worker(proxy.backend_port):
            client.submit([make_sequence(1, 2)]).result(timeout=60)
        lost = client.submit([make_sequence(1, 2)], timeout_s=0.3)
        with pytest.raises(TeacherUnavailable):
            lost.result(timeout=60)
        waiting = client.submit([make_sequence(5, 6)])
        with running_proxy(port) as proxy, running_worker(proxy.backend_port):
            assert_scored(waiting.result(timeout=60), [make_sequence(5, 6)])


def test_client_repeats_requests_of_killed_proxy() -> None:
    """After SIGKILL, the client detects the lost connection and repeats the requests without a result."""
    port, backend_port = free_port(), free_port()
    command = [sys.executable, "-m", "teacher", "proxy", f"--frontend-port={port}", f"--backend-port={backend_port}"]
    first = subprocess.Popen(command)
    try:
        with TeacherClient(server_port=port, timeout_s=120) as client:
            client.status(timeout_s=60)  # the proxy has started
            pending = client.submit([make_sequence(5, 6)])
            client.status(timeout_s=60)  # sent after `pending`, so the proxy has both
            first.kill()
            first.wait(timeout=60)
            with running_proxy(port) as proxy, running_worker(proxy.backend_port):
                assert_scored(pending.result(timeout=60), [make_sequence(5, 6)])
    finally:
        first.kill()
        first.wait(timeout=60)


def test_stopped_proxy_returns_waiting_requests() -> None:
    with TeacherClient(server_port=free_port(), timeout_s=120) as client:
        port = int(client.address.rsplit(":", 1)[1])
        with running_proxy(port):
            waiting = client.submit([make_sequence(5, 6)])
            client.status(timeout_s=60)  # sent after `waiting`, so the proxy has both
        assert not waiting.done()
        with running_proxy(port) as proxy, running_worker(proxy.backend_port):
            assert_scored(waiting.result(timeout=60), [make_sequence(5, 6)])


def test_stopped_proxy_finishes_requests_in_flight() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with ExitStack() as running:
        proxy = Proxy(frontend_port=0, backend_port=0)
        stop = StopFlag()
        thread = threading.Thread(target=proxy.run, args=(stop,), daemon=True)
        thread.start()
        running.enter_context(running_worker(proxy.backend_port, engine))
        client = running.enter_context(TeacherClient(server_port=proxy.frontend_port, timeout_s=20))
        begun = client.submit([make_sequence(1, 2)])
        assert engine.added.acquire(timeout=60)
        stop.set()
        thread.join(timeout=0.5)
        assert thread.is_alive() and not begun.done()
        engine.gate.set()
        assert_scored(begun.result(timeout=60), [make_sequence(1, 2)])
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_workers_share_work_by_tokens(proxy: Proxy, client: TeacherClient) -> None:
    engines = [FakeEngine(capacity_tokens=60), FakeEngine(capacity_tokens=60)]
    for engine in engines:
        engine.gate.clear()
    with running_worker(proxy.backend_port, engines[0]), running_worker(proxy.backend_port, engines[1]):
        # One long request for the first worker, then short ones with fewer tokens in total for the other.
        futures = [client.submit([make_sequence(*range(31))])]
        futures += [client.submit([make_sequence(1, 2)]) for _ in range(15)]
        for _ in range(15):
            assert engines[1].added.acquire(timeout=60)
        for engine in engines:
            engine.gate.set()
        for future in futures:
            future.result(timeout=60)
    assert [engine.n_scored for engine in engines] == [1, 15]


def test_worker_gets_at_most_its_capacity(proxy: Proxy, client: TeacherClient) -> None:
    engine = FakeEngine(capacity_tokens=10)
    engine.gate.clear()
    with running_worker(proxy.backend_port, engine):
        futures = [client.submit([make_sequence(1, 2)]) for _ in range(20)]
        with raises(TeacherTimeout, stage="queued"):
            client.submit([make_sequence(1, 2)], timeout_s=0.8).result(timeout=60)
        for _ in range(5):
            assert engine.added.acquire(timeout=60)
        assert not engine.added.acquire(timeout=0.2)
        engine.gate.set()
        for future in futures:
            future.result(timeout=60)


def test_requests_of_leaving_worker_go_to_another(proxy: Proxy, client: TeacherClient) -> None:
    leaving = FakeEngine()
    leaving.gate.clear()
    with running_worker(proxy.backend_port, leaving):
        futures = [client.submit([make_sequence(1, i)]) for i in range(10)]
        for _ in futures:
            assert leaving.added.acquire(timeout=60)
    assert leaving.n_scored == 0
    with running_worker(proxy.backend_port):
        for i, future in enumerate(futures):
            assert_scored(future.result(timeout=60), [make_sequence(1, i)])


def test_request_that_kills_engines_is_given_up(proxy: Proxy, client: TeacherClient) -> None:
    with ExitStack() as workers:
        for _ in range(4):
            workers.enter_context(running_worker(proxy.backend_port))
        poison = client.submit([make_sequence(1, 99)])
        with raises(TeacherRequestError, n_losses=3):
            poison.result(timeout=60)
        assert client.hello().n_workers == 1
        assert_scored(client.submit([make_sequence(3, 4)]).result(timeout=60), [make_sequence(3, 4)])


def test_worker_with_other_model_is_refused(proxy: Proxy, client: TeacherClient) -> None:
    with running_worker(proxy.backend_port), running_worker(proxy.backend_port, FakeEngine(OTHER_INFO)) as other:
        other.thread.join(timeout=60)
        assert isinstance(other.error, TeacherRequestError)
        assert other.error.operation == "registration" and "CKPT_PATH" in other.error.options
        assert len(other.error.details) == 2, "a header and the field that differs"
        assert client.hello().n_workers == 1


def test_worker_without_proxy_is_unavailable() -> None:
    with raises(TeacherUnreachable, operation="registration", refusal=""):
        Worker(FakeEngine(), backend_port=free_port()).run(StopFlag(), register_timeout_s=0.2)


def test_garbage_on_both_ports_is_ignored(proxy: Proxy, client: TeacherClient) -> None:
    rng = np.random.default_rng(0)
    with running_worker(proxy.backend_port), zmq.Context() as context:
        for port in (proxy.frontend_port, proxy.backend_port):
            with socket.create_connection(("127.0.0.1", port)) as raw:  # not ZeroMQ
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + rng.bytes(1000))
            with context.socket(zmq.DEALER) as garbage:
                garbage.setsockopt(zmq.LINGER, 1000)
                garbage.connect(f"tcp://127.0.0.1:{port}")
                garbage.send(b"")
                garbage.send_multipart([b"", b""])
                garbage.send_multipart([rng.bytes(50) for _ in range(5)])
                garbage.send_multipart(protocol.encode(Welcome()))
                garbage.send_multipart(protocol.encode(ScoreReply(1, [expected_scores(make_sequence(1, 2))])))
                garbage.send_multipart([b"x"] * (LIMITS.frames + 100))
                # Only the last message carries a request id and gets a reply.
                garbage.send_multipart([protocol.encode(Hello(77, 1.0))[0], b"an unannounced array"])
                replies = []
                while not any(isinstance(r, Failure) and r.request_id == 77 for r in replies) and garbage.poll(10_000):
                    replies.append(protocol.decode(garbage.recv_multipart()))
                assert isinstance(replies[-1], Failure) and isinstance(replies[-1].error, TeacherProtocolError)
                assert replies[-1].error.entry == "arrays"
        sequences = [make_sequence(1, 2, 3)]
        assert_scored(client.submit(sequences).result(timeout=60), sequences)


def test_other_protocol_version_error_names_it(proxy: Proxy) -> None:
    import msgpack

    with zmq.Context() as context, context.socket(zmq.DEALER) as old:
        old.connect(f"tcp://127.0.0.1:{proxy.frontend_port}")
        header = {**msgpack.unpackb(protocol.encode(Hello(5, 1.0))[0]), "v": 99}
        old.send(msgpack.packb(header))
        assert old.poll(5000)
        message = protocol.decode(old.recv_multipart())
    assert isinstance(message, Failure) and message.request_id == 5
    assert isinstance(message.error, TeacherProtocolError) and message.error.peer_version == 99


def test_proxy_port_in_use_is_refused(proxy: Proxy) -> None:
    address = f"tcp://127.0.0.1:{proxy.frontend_port}"
    with raises(TeacherSetupError, address=address, options=("--frontend-port", "--backend-port")):
        Proxy(frontend_port=proxy.frontend_port, backend_port=0)


def test_client_close_frees_resources_and_fails_requests(proxy: Proxy) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        client = TeacherClient(server_port=proxy.frontend_port)
        pending = client.submit([make_sequence(1, 2)])
        client.close()
        client.close()
        with raises(TeacherClosed, operation="scoring 1 sequences", address=client.address):
            pending.result(timeout=60)
        with raises(TeacherClosed, operation="", address=client.address):
            client.submit([make_sequence(1, 2)])
    # The proxy in this process closes its side of each connection when it detects the disconnection.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert threading.active_count() == threads


def test_client_in_forked_child_is_refused(client: TeacherClient) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            client.submit([make_sequence(1, 2)])
        except TeacherClosed:
            client.close()
            os._exit(0)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_package_import_loads_no_engine() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'ray', 'megatron', 'recipe_gkd'}"
    code = f"import sys, teacher, teacher.worker, teacher.proxy; sys.exit(len({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
