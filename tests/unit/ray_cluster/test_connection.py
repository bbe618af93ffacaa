from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster import connection
from recipe_gkd.runtime.worker_variables import RES_OPTIONS, worker_variables
from tests._support.base_config import base_config
from tests._support.errors import raises

TIMED_OUT = "The current node timed out during startup. This could happen because ..."


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a fake ``ray.init`` starts."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


class TestConnectedCluster:
    @pytest.mark.parametrize("of_the_user", [None, "timeout:2"])
    def test_driver_and_workers_limit_name_lookups(
        self, monkeypatch: pytest.MonkeyPatch, of_the_user: str | None
    ) -> None:
        monkeypatch.setattr(connection, "start_local_cluster", lambda **_: None)
        monkeypatch.setattr(ray, "shutdown", lambda: None)  # This process may have the cluster of other tests.
        monkeypatch.setattr(os, "environ", {} if of_the_user is None else {"RES_OPTIONS": of_the_user})
        with connection.connected_cluster(base_config()):
            assert os.environ["RES_OPTIONS"] == (of_the_user or RES_OPTIONS)
            assert worker_variables({}, os.environ, {})["RES_OPTIONS"] == (of_the_user or RES_OPTIONS)


class TestStartLocalCluster:
    def test_timeout_of_ray_kills_its_processes_and_tries_again(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        started: list[subprocess.Popen[bytes]],
    ) -> None:
        def init(**settings: object) -> SimpleNamespace:
            started.append(subprocess.Popen(["sleep", "3600"]))
            if len(started) == 1:
                raise Exception(TIMED_OUT)
            return SimpleNamespace(address_info={"session_dir": "/tmp/ray/session_of_test_connection"})

        monkeypatch.setattr(ray, "init", init)
        connection.start_local_cluster(num_cpus=1)
        assert [process.poll() for process in started] == [-9, None]
        assert "trying again" in caplog.text

    def test_attempts_are_repeated_until_the_deadline_and_the_error_is_raised_unchanged(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = [0.0]

        def init(**settings: object) -> None:
            clock[0] += 30
            raise Exception(TIMED_OUT)

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(connection.time, "monotonic", lambda: clock[0])
        with (
            raises(ResourceError, waited_s=140.0, node="") as caught,
            connection.connected_cluster(base_config("trainer.startup_timeout_s=140")),
        ):
            pass
        assert clock[0] == 5 * 30 and "trainer.startup_timeout_s" in caught.value.remedy

    def test_other_error_of_a_local_start_does_not_advise_a_local_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def init(**settings: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(ray, "init", init)
        with raises(ResourceError, node="") as caught:
            connection.connected_cluster(base_config()).__enter__()
        assert isinstance(caught.value.__cause__, OSError) and "ray_init.address" not in caught.value.remedy
        with raises(ResourceError, node="a:1"):
            connection.connected_cluster(base_config("ray_init.address=a:1")).__enter__()

    def test_logging_level_cannot_be_overridden(self) -> None:
        with pytest.raises(TypeError, match="logging_level"):
            connection.start_local_cluster(logging_level=10)
