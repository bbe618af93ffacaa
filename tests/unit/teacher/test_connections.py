"""Threads of the proxy's sockets, several connections of one client, and plain connections on trusted networks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from teacher import TeacherClient, TeacherRequestError, TeacherSequence
from teacher.__main__ import main
from teacher.errors import TeacherClosed, TeacherSetupError
from teacher.proxy.proxy_sockets import SocketSettings
from teacher.wire.auth import check_bind, server_keys
from teacher.wire.make_keys import make_keys
from tests._support.errors import raises
from tests._support.fake_worker import FakeEngine, expected_scores, running_worker
from tests._support.teacher_service import running_proxy
from tests._support.waiting import wait_until


def io_thread_runtimes_ns() -> dict[str, int]:
    """Return the CPU time of libzmq's I/O threads of this process, in nanoseconds by thread id."""
    runtimes = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            if (task / "comm").read_text().startswith("ZMQbg/IO"):
                runtimes[task.name] = int((task / "schedstat").read_text().split()[0])
    return runtimes


class TestIOThreads:
    def test_proxy_connections_are_spread_over_its_io_threads(self) -> None:
        """Each accepted connection is assigned to an I/O thread, so reading one socket is not limited to one thread."""
        before = io_thread_runtimes_ns()
        with running_proxy(sockets=SocketSettings(io_threads=3)) as proxy:
            wait_until(lambda: len(io_thread_runtimes_ns().keys() - before.keys()) == 3)  # a thread names itself
            of_proxy = io_thread_runtimes_ns().keys() - before.keys()
            idle = io_thread_runtimes_ns()
            sequences = [TeacherSequence(np.arange(1, 31, dtype=np.int32), 1)] * 64
            with (
                running_worker(proxy.backend_port, FakeEngine()),
                TeacherClient(server_port=proxy.frontend_port, timeout_s=20, n_connections=6) as client,
            ):
                for future in [client.submit(sequences) for _ in range(6)]:
                    future.result(timeout=60)
                busy = io_thread_runtimes_ns()
        used = [thread for thread in of_proxy if busy[thread] > idle[thread]]
        assert len(used) >= 2


class TestConnections:
    def test_client_several_connections_share_the_calls(self) -> None:
        sequences = [TeacherSequence(np.array([1, 2, 3, i], np.int32), 1) for i in range(8)]
        with (
            running_proxy() as proxy,
            running_worker(proxy.backend_port, FakeEngine()),
            TeacherClient(server_port=proxy.frontend_port, timeout_s=20, n_connections=3) as client,
        ):
            client.hello()
            futures = [client.submit([sequence]) for sequence in sequences]
            for sequence, future in zip(sequences, futures, strict=True):
                (scored,) = future.result(timeout=60)
                np.testing.assert_array_equal(scored.topk_ids_TK, expected_scores(sequence).topk_ids_TK)
            assert len(client.status().clients) == 3

    @pytest.mark.parametrize("n_connections", [0, 65])
    def test_client_invalid_number_of_connections_is_refused(self, n_connections: int) -> None:
        with raises(TeacherRequestError, argument="n_connections"):
            TeacherClient(n_connections=n_connections)

    def test_client_close_ends_all_connections(self) -> None:
        with running_proxy() as proxy:
            client = TeacherClient(server_port=proxy.frontend_port, n_connections=2)
            client.close()
            for _ in range(2):
                with raises(TeacherClosed, operation="", address=client.address):
                    client.submit([TeacherSequence(np.array([1, 2], np.int32), 1)])


class TestTrustedNetwork:
    def test_check_bind_trusted_network_accepts_any_address_without_keys(self) -> None:
        with raises(TeacherSetupError, options=("--bind", "--auth-dir", "--trusted-network")):
            check_bind("0.0.0.0", None)
        check_bind("0.0.0.0", None, trusted_network=True)
        with (
            running_proxy(bind="0.0.0.0", sockets=SocketSettings(trusted_network=True)) as proxy,
            TeacherClient(server_port=proxy.frontend_port, timeout_s=20) as client,
        ):
            assert client.status().workers == ()

    def test_proxy_trusted_network_with_keys_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_keys(tmp_path / "keys")
        assert server_keys(tmp_path / "keys") is not None
        flags = ["--frontend-port", "0", "--backend-port", "0", "--http-port", "-1", "--trusted-network"]
        assert main(["proxy", *flags, "--auth-dir", str(tmp_path / "keys")]) == 1
        assert "--auth-dir is set; omit one of them" in capsys.readouterr().err
