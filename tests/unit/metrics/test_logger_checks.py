"""Logins of tracking services, before workers start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.loggers.logger_checks import check_loggers
from tests._support.errors import raises
from tests._support.repository import REPO


class Settings:
    """Settings of SwanLab 0.10 in the parts that matter, if it is not installed: it is not part of the extra dev."""

    def __init__(self) -> None:
        self.mode = os.environ.get("SWANLAB_MODE", "online")
        self.api_key = os.environ.get("SWANLAB_API_KEY")


@pytest.fixture(autouse=True)
def without_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "swanlab_root"))
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec("swanlab") is None:
        module = ModuleType("swanlab")
        module.Settings = Settings  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "swanlab", module)


def test_swanlab_without_login_is_refused_with_a_remedy() -> None:
    with raises(ConfigError, keys=("trainer.logger",)) as caught:
        check_loggers(["console", "swanlab"])
    assert "SWANLAB_MODE=offline" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [("SWANLAB_API_KEY", "key"), ("SWANLAB_MODE", "offline"), ("SWANLAB_MODE", "local"), ("SWANLAB_MODE", "disabled")],
)
def test_swanlab_with_a_key_or_without_network_is_accepted(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    check_loggers(["console", "swanlab"])


CHECK_WANDB = """
import logging, os
from recipe_gkd.metrics.loggers.logger_checks import check_loggers

logging.basicConfig()
check_loggers(["wandb"])
os._exit(0)  # W&B's service process would be awaited
"""


@contextmanager
def wandb_service(status: int | None) -> Iterator[int]:
    """Serve W&B's requests with a status and an error, or with no answer at all. Yield the port."""
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if status is None:
                done.wait(60)
                return
            body = b'{"errors": [{"message": "user is not logged in"}]}' if status < 500 else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        done.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "key", "expected"),
    [
        pytest.param(503, "a" * 40, "the login could not be checked", marks=pytest.mark.slow),
        (None, "a" * 40, "the login could not be checked"),
        (401, "a" * 40, "ConfigError: trainer.logger has wandb, but its login failed"),
        pytest.param(
            503, "short", "ConfigError: trainer.logger has wandb, but its login failed", marks=pytest.mark.slow
        ),
        (503, "", "ConfigError: trainer.logger has wandb, but no API key was found"),
    ],
)
def test_only_a_missing_or_rejected_key_of_wandb_is_an_error(
    tmp_path: Path, status: int | None, key: str, expected: str
) -> None:
    pytest.importorskip("wandb")
    with wandb_service(status) as port:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | {
            "WANDB_BASE_URL": f"http://127.0.0.1:{port}",
            "WANDB_HTTP_TIMEOUT": "1",
            "WANDB_DIR": str(tmp_path),
            "PYTHONPATH": str(REPO),
        }
        checked = subprocess.run(
            [sys.executable, "-c", CHECK_WANDB],
            env=environment | ({"WANDB_API_KEY": key} if key else {}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert expected in checked.stderr
    assert (checked.returncode != 0) == expected.startswith("ConfigError")
