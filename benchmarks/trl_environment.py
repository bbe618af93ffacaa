"""A Python environment with TRL, which needs versions of packages that this project does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ["trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0"]
TORCH = "2.13.0"
ENVIRONMENT = Path.home() / ".cache" / "recipe_gkd" / "vs_trl"
INSTALL_TIMEOUT_S = 900.0


class SkippedError(Exception):
    """TRL could not be installed. The message is the reason."""


def environment_python(folder: Path) -> Path:
    """Return the interpreter of an environment with TRL. Create the environment if it does not exist.

    Raises:
        SkippedError: It could not be created.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join([f"torch=={TORCH}", *REQUIREMENTS])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    beside = Path(sys.executable).with_name("uv")  # installed there by launch/setup.sh
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise SkippedError("uv was not found; run bash launch/setup.sh, or install uv")
    env = {**_pip_settings(), **os.environ}
    install = [uv, "pip", "install", "-q", "--python", str(python)]
    _run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)], env)
    try:
        _run([*install, f"torch=={TORCH}+cpu", "numpy"], env)
    except SkippedError:
        _run([*install, f"torch=={TORCH}", "numpy", "--default-index", "https://download.pytorch.org/whl/cpu"], env)
    _run([*install, *REQUIREMENTS], env)
    _run([str(python), "-c", "from trl import DistillationTrainer"], env)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _pip_settings() -> dict[str, str]:
    """Return uv's variables with the indexes of pip's configuration, which uv does not read."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    ).stdout
    values: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):  # variables precede files
        name, _, value = line.partition("=")
        values[name.rpartition(".")[2]] = value.strip("'").replace("\\n", " ")
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    found = {variable: values[name] for name, variable in names.items() if values.get(name)}
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_HTTP_TIMEOUT": "180", **found}


def _run(command: list[str], env: dict[str, str]) -> None:
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SkippedError(f"{' '.join(command[:3])}: {error}") from error
    if done.returncode:
        raise SkippedError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
