"""Contents of an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests._support.repository import REPO


def test_wheel_contains_every_module_config_file_script_and_template(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(REPO)], check=True, timeout=120, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    packed = {Path(name) for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = [file for top in ("recipe_gkd", "teacher") for file in (REPO / top).rglob("*.py")]
    scripts = list((REPO / "teacher").rglob("*.sh"))
    page = list((REPO / "recipe_gkd/commands/report/assets").iterdir())
    yaml_files = REPO.glob("config/**/*.yaml")
    configs = {Path("recipe_gkd/config_files") / file.relative_to(REPO / "config") for file in yaml_files}
    assert packed >= {file.relative_to(REPO) for file in [*modules, *scripts, *page]} | configs
    assert not [name for name in packed if name.parts[0] not in ("recipe_gkd", "teacher")]


@pytest.fixture(scope="module")
def editable_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that an editable installation of this repository puts into site-packages."""
    folder = tmp_path_factory.mktemp("editable")
    program = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(folder)], cwd=REPO, check=True, timeout=120, capture_output=True)
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize("name", ["teacher", "recipe_gkd"])
def test_editable_installation_in_a_folder_with_the_name_of_a_package_imports_the_package(
    editable_site: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()  # a model, or results
    packages = sysconfig.get_path("purelib")  # appended without its .pth files, which install the checkout itself
    program = (
        f"import site, sys; site.addsitedir({str(editable_site)!r}); sys.path.append({packages!r}); "
        f"import recipe_gkd.config, {name}; print({name}.__file__)"
    )
    command = [sys.executable, "-S", "-c", program]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == str(REPO / name / "__init__.py"), done.stderr


@pytest.mark.parametrize("command", ["recipe_gkd", "recipe_gkd.main_gkd"])
def test_command_with_another_package_teacher_names_both_in_a_sentence(tmp_path: Path, command: str) -> None:
    (tmp_path / "teacher.py").touch()
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-m", command, "--help"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"teacher is {tmp_path / 'teacher.py'}, expected {REPO / 'teacher'}" in done.stderr
    assert "run the command in another folder" in done.stderr
