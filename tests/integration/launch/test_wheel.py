"""The built wheel in a separate environment, used from a folder outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from recipe_gkd.quickstart.models import RECIPES, SELF_RECIPES
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the wheel. Its dependencies are those of the running environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(REPO)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    [wheel] = folder.glob("*.whl")
    python = str(folder / "venv/bin/python")
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True
    )
    [packages] = (folder / "venv/lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # follows the venv's own packages
    return folder / "venv"


def run(environment: Path, folder: Path, *command: str) -> str:
    program, *arguments = command
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(environment / "bin" / program), *arguments],
        cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_provides_commands_configurations_and_scripts(environment: Path, tmp_path: Path) -> None:
    location = Path(run(environment, tmp_path, "python", "-c", "import recipe_gkd; print(recipe_gkd.__file__)").strip())
    assert location.is_relative_to(environment)
    assert "check-config" in run(environment, tmp_path, "recipe-gkd", "--help")
    run(environment, tmp_path, "recipe-gkd", "check-config", "--config-name", "quickstart", "trainer.scheduler=sync")
    shown = run(
        environment, tmp_path, "python", "-m", "recipe_gkd.main_gkd", "--config-name", "quickstart", "--cfg", "job"
    )
    assert "total_training_steps: 250" in shown
    assert "--out" in run(environment, tmp_path, "python", "-m", "recipe_gkd.quickstart.prepare", "--help")
    weights = {file.name: file.read_bytes() for file in (REPO / "recipe_gkd" / "quickstart" / "weights").iterdir()}
    packaged = location.parent / "quickstart" / "weights"
    assert {file.name: file.read_bytes() for file in packaged.iterdir()} == weights
    assert {f"{role}{end}" for role in (*RECIPES, *SELF_RECIPES) for end in (".json", ".safetensors")} == set(weights)
    script = location.parents[1] / "teacher" / "start_server.sh"
    shown = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True).stdout
    assert "CKPT_PATH" in shown
