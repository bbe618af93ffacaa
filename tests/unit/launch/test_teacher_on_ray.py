"""Arguments of launch/teacher_on_ray.py. Ray is not started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch import teacher_on_ray
from teacher.wire.make_keys import make_keys

PUBLIC = ("--server-ip", "10.0.0.1", "--ckpt-path", "/models/teacher")


class RayStarted(Exception):
    """The arguments were accepted."""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        raise RayStarted

    monkeypatch.setattr(teacher_on_ray.ray, "init", start)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["teacher_on_ray", *PUBLIC, *arguments])
    return teacher_on_ray.main()


def test_trusted_network_allows_a_public_address_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayStarted):
        run(monkeypatch, "--trusted-network")


def test_public_address_without_keys_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(monkeypatch) == 1
    assert "--trusted-network" in caplog.text


def test_trusted_network_with_keys_is_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path / "keys")
    assert run(monkeypatch, "--trusted-network", "--auth-dir", str(tmp_path / "keys")) == 1
    assert "omit one of them" in caplog.text
