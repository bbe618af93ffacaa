"""A virtual environment with the package verifiers, which does not fit the installation of this project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VERSION = "0.4.0"
INSTALL_TIMEOUT_S = 1500


@pytest.fixture(scope="session")
def verifiers_python(request: pytest.FixtureRequest) -> Path:
    """Interpreter with verifiers and uv. The folder is kept in pytest's cache."""
    folder = request.config.cache.mkdir(f"verifiers-{VERSION}")
    python = folder / "bin/python"
    check = [str(python), "-c", f"import verifiers, uv; assert verifiers.__version__ == {VERSION!r}"]
    if python.exists() and not subprocess.run(check, capture_output=True, check=False).returncode:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_TIMEOUT_S)
    install = [str(python), "-m", "pip", "install", "-q", f"verifiers=={VERSION}", "uv"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not install verifiers in {INSTALL_TIMEOUT_S} s")
    if done.returncode:
        pytest.skip(f"pip cannot install verifiers: {done.stderr[-500:]}")
    return python


@pytest.fixture(scope="session")
def hub(verifiers_python: Path, request: pytest.FixtureRequest) -> Path:
    """Folder of environments that the interpreter can import. Its cache is not the user's."""
    folder = Path(__file__).parent / "hub"
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setenv("PYTHONPATH", str(folder))
    patch.setenv("PATH", os.pathsep.join([str(verifiers_python.parent), os.environ["PATH"]]))
    patch.setenv("HOME", str(request.config.cache.mkdir("verifiers-home")))
    return folder
