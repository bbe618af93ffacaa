"""Connection of the client: lost and restored, or refused because of keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from teacher import TeacherClient
from teacher.errors import TeacherUnreachable
from teacher.proxy.curve_authenticator import CurveAuthenticator
from teacher.wire import connection
from teacher.wire.auth import server_keys
from teacher.wire.make_keys import make_keys
from teacher.wire.messages import Score
from tests._support.errors import raises
from tests._support.ports import free_port
from tests._support.scripted_service import ScriptedService, assert_scores, sequence


def test_lost_connection_resends_open_requests() -> None:
    port = free_port()
    with TeacherClient(server_port=port, timeout_s=20) as client:
        with ScriptedService(port) as service:
            done, pending = client.submit([sequence(3)]), client.submit([sequence(9000), sequence(7)])
            first = [service.receive(Score) for _ in range(3)]
            service.reply(first[0])
            done.result(timeout=60)
            name = service.client
            assert len(name) == 16 and name.startswith(b"c")
        with ScriptedService(port) as service:
            again = [service.receive(Score) for _ in range(2)]
            assert service.client == name
            assert [request.request_id for request in again] == [request.request_id for request in first[1:]]
            for request in again:
                service.reply(request)
            assert_scores(pending.result(timeout=60), [sequence(9000), sequence(7)])
            assert service.receive_any(0.05) is None


def test_outage_beyond_reconnect_limit_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RECONNECT_AFTER_LOSS_S", 0.05)
    port = free_port()
    with TeacherClient(server_port=port, timeout_s=20) as client:
        with ScriptedService(port) as service:
            waiting = client.submit([sequence(5)])
            service.receive(Score)
        with raises(TeacherUnreachable, operation="hello", refusal=""):
            client.hello(timeout_s=0.3)
        with ScriptedService(port) as service:
            service.reply(service.receive(Score))
            assert_scores(waiting.result(timeout=60), [sequence(5)])
            assert service.receive_any(0.2) is None


# --- keys ---


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return key folders of the tested service and of an unrelated one."""
    ours, others = (tmp_path_factory.mktemp(name) for name in ("ours", "others"))
    for folder in (ours, others):
        make_keys(folder)
    return ours, others


@pytest.mark.parametrize(
    ("client_has", "service_has_keys", "refusals"),
    [
        # Either side can notice the mismatch first.
        (None, True, ("mechanism", "handshake")),
        ("ours", False, ("mechanism", "handshake")),
        ("others", True, ("handshake",)),
    ],
    ids=["client_without", "service_without", "of_another_service"],
)
def test_mismatched_keys_are_logged_and_reported(
    folders: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    client_has: str | None,
    service_has_keys: bool,
    refusals: tuple[str, ...],
) -> None:
    monkeypatch.setattr(connection, "RECONNECT_AFTER_REFUSAL_S", 0.05)
    ours = folders[0]
    auth_dir = None if client_has is None else next(folder for folder in folders if client_has in folder.name)
    with (
        ScriptedService(keys=server_keys(ours) if service_has_keys else None) as service,
        TeacherClient(server_port=service.port, auth_dir=auth_dir) as client,
        raises(TeacherUnreachable, auth_dir=auth_dir, options=("auth_dir",)) as refused,
    ):
        client.hello(timeout_s=0.4)
    assert refused.value.refusal in refusals
    assert 1 <= len(caplog.records) <= 2 and refused.value.what in caplog.records[-1].getMessage()


def test_refused_key_works_after_service_accepts_it(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RECONNECT_AFTER_REFUSAL_S", 0.05)
    keys, port = server_keys(folders[0]), free_port()
    assert keys is not None
    without_ours = replace(keys, allowed=(zmq.curve_keypair()[0],), allowed_dir=None)
    with TeacherClient(server_port=port, auth_dir=folders[0], timeout_s=5) as client:
        waiting = client.submit([sequence(5)])
        with (
            ScriptedService(port, keys=without_ours) as service,
            CurveAuthenticator(service.context, without_ours),
            raises(TeacherUnreachable, refusal="key", auth_dir=folders[0]),
        ):
            client.hello(timeout_s=0.4)
        with ScriptedService(port, keys=keys) as service, CurveAuthenticator(service.context, keys):
            service.reply(service.receive(Score))
            assert_scores(waiting.result(timeout=60), [sequence(5)])
