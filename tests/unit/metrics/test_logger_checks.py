"""Logins of tracking services, before workers start."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.logger_checks import check_loggers


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
    with pytest.raises(ConfigError, match=r"no API key was found; run `swanlab login`.*SWANLAB_MODE=offline"):
        check_loggers(["console", "swanlab"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("SWANLAB_API_KEY", "key"), ("SWANLAB_MODE", "offline"), ("SWANLAB_MODE", "local"), ("SWANLAB_MODE", "disabled")],
)
def test_swanlab_with_a_key_or_without_network_is_accepted(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    check_loggers(["console", "swanlab"])
