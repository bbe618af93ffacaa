"""Contents of an installed package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests._support.repository import REPO


def test_wheel_contains_every_module_config_file_and_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(REPO)], check=True, timeout=120, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    packed = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = [file for top in ("recipe_gkd", "teacher") for file in (REPO / top).rglob("*.py")]
    scripts = list((REPO / "teacher").rglob("*.sh"))
    yaml_files = REPO.glob("config/**/*.yaml")
    configs = {Path("recipe_gkd/config_files") / file.relative_to(REPO / "config") for file in yaml_files}
    assert packed >= {file.relative_to(REPO) for file in [*modules, *scripts]} | configs
    assert not [name for name in packed if name.parts[0] not in ("recipe_gkd", "teacher")]
