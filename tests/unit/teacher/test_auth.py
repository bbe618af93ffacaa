"""CURVE keys: accepted and refused peers, log messages, key folders, and handshakes that never finish."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from teacher import TeacherClient, TeacherSequence, TeacherUnavailable
from teacher.errors import TeacherSetupError, TeacherUnreachable
from teacher.logs import LogRateLimiter
from teacher.proxy import Proxy
from teacher.proxy.curve_authenticator import CurveAuthenticator
from teacher.proxy.http import HttpServer
from teacher.proxy.proxy_sockets import SocketSettings
from teacher.wire import sockets
from teacher.wire.auth import ClientKeys, ServerKeys, check_bind, client_keys, server_keys
from teacher.wire.make_keys import add_client, make_keys
from teacher.wire.sockets import WORKER_HEARTBEAT, make_socket
from teacher.worker import Worker
from tests._support.errors import raises
from tests._support.fake_worker import FakeEngine, expected_scores, running_worker
from tests._support.teacher_service import StopFlag, running_proxy
from tests._support.waiting import wait_until

SEQUENCE = TeacherSequence(np.array([1, 2, 3], np.int32), 1)


@pytest.fixture(scope="module")
def auth_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "service"
    make_keys(folder)
    return folder


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of another service."""
    folder = tmp_path_factory.mktemp("keys") / "another"
    make_keys(folder)
    return folder


@contextmanager
def worker_with(auth_dir: Path | None, backend_port: int) -> Iterator[None]:
    stop, registered = StopFlag(), threading.Event()
    worker = Worker(FakeEngine(), backend_port=backend_port, auth_dir=auth_dir)
    run = {"register_timeout_s": 10.0, "on_registered": registered.set}
    thread = threading.Thread(target=worker.run, args=(stop,), kwargs=run, daemon=True)
    thread.start()
    try:
        assert registered.wait(timeout=60)
        yield
    finally:
        stop.set()
        thread.join(timeout=60)
        assert not thread.is_alive()
        stop.close()


def assert_served(proxy: Proxy, folder: Path | None) -> None:
    with TeacherClient(server_port=proxy.frontend_port, timeout_s=10, auth_dir=folder) as client:
        (answer,) = client.submit([SEQUENCE]).result()
        np.testing.assert_array_equal(answer.topk_ids_TK, expected_scores(SEQUENCE).topk_ids_TK)
        assert len(client.status().workers) == 1


def wait_for_log(caplog: pytest.LogCaptureFixture, *texts: str) -> None:
    wait_until(lambda: all(text in caplog.text for text in texts))


def test_service_with_keys_serves_allowed_peers_only(
    auth_dir: Path, other_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running_proxy(sockets=SocketSettings(keys=server_keys(auth_dir))) as proxy,
        worker_with(auth_dir, proxy.backend_port),
    ):
        assert_served(proxy, auth_dir / "clients" / "default")
        for folder in (None, other_dir):
            other_client = TeacherClient(server_port=proxy.frontend_port, auth_dir=folder)
            with other_client, pytest.raises(TeacherUnavailable):
                other_client.hello(timeout_s=0.7)
        with raises(TeacherUnreachable, operation="registration", auth_dir=None) as refused:
            Worker(FakeEngine(), backend_port=proxy.backend_port).run(StopFlag(), register_timeout_s=0.7)
        assert refused.value.refusal
        assert_served(proxy, auth_dir)
    wait_for_log(caplog, "refused 127.0.0.1 as a")


def test_authenticator_unknown_key_is_logged_with_address(
    auth_dir: Path, other_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has the server's public key, which is not secret."""
    known, other_client = client_keys(auth_dir), client_keys(other_dir)
    assert known is not None and other_client is not None
    with authenticated_router(server_keys(auth_dir)) as (router, port):
        assert not can_send(router, port, replace(known, public=other_client.public, secret=other_client.secret))
        wait_for_log(caplog, "refused 127.0.0.1: its public key " + other_client.public.decode())
        assert can_send(router, port, known, wait_ms=10_000)


def test_authenticator_reloads_allowed_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with authenticated_router(server_keys(tmp_path / "keys")) as (router, port):
        assert can_send(router, port, client_keys(tmp_path / "keys"), wait_ms=10_000)
        added = add_client(tmp_path / "keys", "second")
        (tmp_path / "keys" / "allowed" / "half-copied.key").write_text("curve\n")
        threading.Event().wait(1.0)  # the folder is read at most once per second
        assert can_send(router, port, client_keys(added), wait_ms=10_000)
        (tmp_path / "keys" / "allowed" / "second.key").unlink()
        threading.Event().wait(1.0)
        assert not can_send(router, port, client_keys(added))


def test_authenticator_logs_failed_handshakes(
    auth_dir: Path, other_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with authenticated_router(server_keys(auth_dir)) as (router, port):
        assert not can_send(router, port, client_keys(other_dir))
        wait_for_log(caplog, "as a client: it")  # the address is unknown if the peer closes first
        assert not can_send(router, port, None)
        wait_for_log(caplog, "no keys")
        assert can_send(router, port, client_keys(auth_dir), wait_ms=10_000)
    caplog.clear()
    with authenticated_router(None) as (router, port):
        assert not can_send(router, port, client_keys(auth_dir))
        wait_for_log(caplog, " as a client")
        assert can_send(router, port, None, wait_ms=10_000)


def test_secured_socket_without_authenticator_refuses_all(auth_dir: Path) -> None:
    """By default, libzmq accepts every client that has the server's public key."""
    with zmq.Context() as context:
        router = secured(context, server_keys(auth_dir))
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert not can_send(router, port, client_keys(auth_dir))
        router.close()


def test_authenticator_close_ends_threads(auth_dir: Path) -> None:
    before = threading.active_count()
    with authenticated_router(server_keys(auth_dir)):
        assert threading.active_count() > before
    assert threading.active_count() == before


def secured(context: zmq.Context, keys: ServerKeys | ClientKeys | None, kind: int = zmq.ROUTER) -> zmq.Socket:
    return make_socket(context, kind, max_frame_bytes=1000, heartbeat=WORKER_HEARTBEAT, keys=keys)


@contextmanager
def authenticated_router(keys: ServerKeys | None) -> Iterator[tuple[zmq.Socket, int]]:
    with zmq.Context() as context:
        router = secured(context, keys)
        with CurveAuthenticator(context, keys, {"client": router}):
            yield router, router.bind_to_random_port("tcp://127.0.0.1")
        router.close()


def can_send(router: zmq.Socket, port: int, keys: ClientKeys | None, wait_ms: int = 500) -> bool:
    with zmq.Context() as context:
        dealer = secured(context, keys, zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        arrived = bool(router.poll(wait_ms))
        if arrived:
            assert router.recv_multipart()[1:] == [b"hello"]
        dealer.close()
    return arrived


# --- folders of keys -------------------------------------------------------------------------------------------------


def test_make_keys_protects_and_never_overwrites(auth_dir: Path) -> None:
    before = {path: path.read_bytes() for path in auth_dir.rglob("*") if path.is_file()}
    for path in before:
        if path.suffix == ".key_secret":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (auth_dir, auth_dir / "clients", auth_dir / "clients" / "default"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with raises(TeacherSetupError, path=auth_dir, options=("--auth-dir",)):
        make_keys(auth_dir)
    with raises(TeacherSetupError, path=auth_dir.parent, options=("--auth-dir",)):
        make_keys(auth_dir.parent)
    with raises(TeacherSetupError, path=auth_dir, options=("--client",)):
        add_client(auth_dir, "default")
    with raises(TeacherSetupError, path=None, options=("--client",)):
        add_client(auth_dir, "../default")
    assert before == {path: path.read_bytes() for path in auth_dir.rglob("*") if path.is_file()}


def test_client_keys_from_server_folder_equal_client_folder(auth_dir: Path) -> None:
    assert client_keys(auth_dir) == client_keys(auth_dir / "clients" / "default") != None  # noqa: E711
    assert server_keys(None) is server_keys("") is client_keys(None) is client_keys("") is None


@pytest.mark.parametrize("damage", ["no folder", "no secret", "open to others", "cut", "not text", "another's secret"])
def test_read_keys_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    secrets = (folder / "server.key_secret", folder / "clients" / "default" / "client.key_secret")
    for secret in secrets:
        if damage == "no secret":
            secret.unlink()
        elif damage == "open to others":
            secret.chmod(0o644)
        elif damage == "cut":
            secret.write_bytes(secret.read_bytes()[:-20])
        elif damage == "not text":
            secret.write_bytes(os.urandom(500))
        elif damage == "another's secret":
            text = secret.read_text()
            other = zmq.curve_keypair()[1].decode()
            secret.write_text(text[: text.index("secret-key")] + f'secret-key = "{other}"\n')
    name = tmp_path / "nowhere" if damage == "no folder" else folder
    for read, secret in zip((server_keys, client_keys), secrets, strict=True):
        path = name if damage == "no folder" else secret
        with raises(TeacherSetupError, path=path, options=("--auth-dir",)):
            read(name)


def test_server_keys_unsafe_or_empty_allowed_dir_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    (folder / "allowed").chmod(0o777)
    with raises(TeacherSetupError, path=folder / "allowed", options=("--auth-dir",)):
        server_keys(folder)
    (folder / "allowed").chmod(0o700)
    (folder / "allowed" / "default.key").unlink()
    with raises(TeacherSetupError, path=folder / "allowed", options=("--auth-dir",)):
        server_keys(folder)


def test_check_bind_without_keys_accepts_loopback_only(auth_dir: Path) -> None:
    for private in ("127.0.0.1", "127.9.8.7", "localhost"):
        check_bind(private, None)
    for public in ("0.0.0.0", "*", "10.0.0.1", "eth0", "no-such-host.invalid", ""):
        with raises(TeacherSetupError, options=("--bind", "--auth-dir", "--trusted-network")):
            check_bind(public, None)
        check_bind(public, server_keys(auth_dir))
    with raises(TeacherSetupError, options=("--bind", "--auth-dir", "--trusted-network")):
        Proxy("0.0.0.0", 0, 0)
    with raises(TeacherSetupError, options=("--bind",)):
        check_bind("::1", server_keys(auth_dir))
    with running_proxy(bind="localhost") as proxy, TeacherClient(server_port=proxy.frontend_port) as client:
        assert client.status().workers == ()


# --- handshakes that never finish ------------------------------------------------------------------------------------


def test_unfinished_handshake_is_dropped_on_every_port(auth_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer sends single bytes, so it is never silent."""
    assert sockets.HANDSHAKE_TIMEOUT_S <= 10
    monkeypatch.setattr(sockets, "HANDSHAKE_TIMEOUT_S", 1.0)
    with ExitStack() as stack:
        proxy = stack.enter_context(running_proxy(sockets=SocketSettings(keys=server_keys(auth_dir))))
        plain = stack.enter_context(running_proxy())
        http = stack.enter_context(
            HttpServer("127.0.0.1", 0, lambda: (proxy.latest_status, 0.0), request_timeout_s=1.0)
        )
        stack.enter_context(worker_with(auth_dir, proxy.backend_port))
        stack.enter_context(running_worker(plain.backend_port))
        greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"  # the start of a ZMTP greeting
        ports = [proxy.frontend_port, proxy.backend_port, plain.frontend_port, plain.backend_port, http.port]
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for port in ports]
        open_peers = set(slow)
        for i in range(60):
            for peer in list(open_peers):
                try:
                    peer.sendall(b"G" if peer is slow[-1] else greeting[i : i + 1])
                    peer.settimeout(0.001)
                    while peer.recv(100):
                        pass
                    open_peers.discard(peer)
                except TimeoutError:
                    continue
                except OSError:
                    open_peers.discard(peer)
            if i == 3:
                assert len(open_peers) == len(slow)
                assert_served(proxy, auth_dir)
                assert_served(plain, None)
            if not open_peers:
                break
            threading.Event().wait(0.1)
        assert open_peers == set()
        assert_served(proxy, auth_dir)


def test_log_rate_limiter_limits_messages_and_memory(caplog: pytest.LogCaptureFixture) -> None:
    limiter = LogRateLimiter(interval_s=60, max_keys=3)
    assert [limiter.count("a", now) for now in (0.0, 1.0, 59.0, 61.0, 62.0)] == [1, 0, 0, 3, 0]
    assert sum(limiter.count(f"peer {i}", 62.0) > 0 for i in range(1000)) <= 4  # bounded memory
    assert limiter.count("b", 1000.0) > 0
    assert logging.getLogger("zmq.auth").handlers == []
