"""The steps of the Dockerfile that need no image, in a folder that stands for the root of the image.

The packages of apt and pip come from the running environment. Not tested: the base image, the packages of apt in it,
the installation of the lock (`tests/unit/launch/test_gpu_installation.py` resolves it), and a GPU in a container.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests._support.dockerfile import docker_instructions
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

ABSOLUTE = re.compile(r"(?<![\w.$}/])/(?=[a-z])")
VENV = Path("opt/venv")


class Image:
    """Root folder of the image, built by the instructions of the Dockerfile.

    Attributes:
        root: Folder that stands for ``/``.
        variables: Result of ``ENV``, with the folders of the machine in place of those of the image.
        workdir: Result of ``WORKDIR``.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.workdir = root, root
        self.variables = {"PATH": os.environ["PATH"], "HOME": str(root / "root")}
        for folder in ("root", "usr/local/bin", "etc/profile.d", VENV.parent):
            (root / folder).mkdir(parents=True)
        for name, arguments in docker_instructions():
            getattr(self, f"_{name.lower()}")(arguments)

    def run(self, *command: str, variables: dict[str, str] | None = None, folder: Path | None = None) -> str:
        """Run a command with the variables of the image, and return what it prints."""
        environment = self.variables if variables is None else variables
        done = subprocess.run(
            command, cwd=folder or self.workdir, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _from(self, _: str) -> None:
        """Ignore the base image, in whose place the running environment is."""

    def _arg(self, arguments: str) -> None:
        name, _, value = arguments.partition("=")
        self.variables[name] = value

    def _env(self, arguments: str) -> None:
        for pair in arguments.split():
            name, value = pair.split("=", 1)
            self.variables[name] = self._on_machine(value).replace("$PATH", self.variables["PATH"])

    def _workdir(self, folder: str) -> None:
        self.workdir = Path(self._on_machine(folder))
        self.workdir.mkdir()

    def _copy(self, arguments: str) -> None:
        assert arguments == ". .", f"COPY {arguments} is not supported by this test"
        copy_context(self.workdir)

    def _run(self, command: str) -> None:
        command = re.sub(r"--mount=\S+", "", command).strip()
        if command.startswith("apt-get "):
            return
        command = self._on_machine(command).replace("python3.12 -m venv", f"{sys.executable} -m venv --without-pip")
        pip = f"{sys.executable} -m pip --python {self.root / VENV}/bin/python install -q --no-deps --no-index"
        command = command.replace("pip install ", f"{pip} --no-build-isolation ")
        self.run("bash", "-euc", command)
        if " -m venv " in command:
            self._add_packages()

    def _add_packages(self) -> None:
        """Let the virtual environment import the packages of the running one, and give it Ray's command."""
        [packages] = (self.root / VENV / "lib").glob("python3*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        _, rest = Path(sysconfig.get_path("scripts"), "ray").read_text().split("\n", 1)
        ray = self.root / VENV / "bin/ray"
        ray.write_text(f"#!{self.root / VENV}/bin/python\n{rest}")
        ray.chmod(0o755)

    def _on_machine(self, text: str) -> str:
        """Return a text with the folders of the machine in place of those of the image."""
        return ABSOLUTE.sub(f"{self.root}/", text)


def copy_context(target: Path) -> None:
    """Copy the repository without what ``.dockerignore`` excludes, as ``COPY . .`` does."""
    lines = (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [as_regex(line) for line in map(str.strip, lines) if line and not line.startswith("#")]

    def excluded(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name).relative_to(REPO).as_posix() for name in names}
        return [name for name, path in paths.items() if any(pattern.fullmatch(path) for pattern in patterns)]

    shutil.copytree(REPO, target, symlinks=True, ignore=excluded, dirs_exist_ok=True)


def as_regex(pattern: str) -> re.Pattern[str]:
    """Return a line of ``.dockerignore`` as a pattern for paths. Parts are matched as in Go's ``filepath.Match``."""
    assert not pattern.startswith("!"), "exceptions are not supported by this test"
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    split = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    return re.compile("".join(parts.get(part, re.escape(part)) for part in split))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("image"))


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("build", "build", True),
        ("build", "recipe_gkd/build", False),
        ("**/__pycache__", "__pycache__", True),
        ("**/__pycache__", "teacher/wire/__pycache__", True),
        ("**/*.egg-info", "recipe_gkd.egg-info", True),
        (".git", ".github", False),
    ],
)
def test_as_regex_matches_like_docker(pattern: str, path: str, matches: bool) -> None:
    assert bool(as_regex(pattern).fullmatch(path)) == matches


def test_context_has_every_tracked_file_and_no_environment(image: Image) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    names = [name for name in tracked.split("\0") if name and os.path.lexists(REPO / name)]
    assert not [name for name in names if not os.path.lexists(image.workdir / name)]
    assert not (image.workdir / ".venv").exists() and not (image.workdir / ".git").exists()


def test_package_of_the_image_is_the_copied_folder_with_its_readme(image: Image) -> None:
    code = (
        "import recipe_gkd, teacher; from importlib.metadata import metadata\n"
        "print(recipe_gkd.__file__, teacher.__file__, metadata('recipe_gkd')['Description'][:20], sep='\\n')"
    )
    package, service, *description = image.run("python", "-c", code, folder=image.root).splitlines()
    assert [package, service] == [f"{image.workdir}/{name}/__init__.py" for name in ("recipe_gkd", "teacher")]
    assert (REPO / "README.md").read_text(encoding="utf-8").startswith("\n".join(description))


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python -m recipe_gkd.main_gkd --help", "--config-name"),
        ("python3 -m recipe_gkd --help", "gpu_smoke"),
        ("recipe-gkd check-config --config-name quickstart trainer.scheduler=sync", ""),
        ("python -m teacher --help", "worker"),
        ("bash teacher/start_server.sh --help", "CKPT_PATH"),
        ("bash launch/quickstart.sh --help", "quickstart"),
    ],
)
def test_command_starts_in_the_working_folder(image: Image, command: str, shown: str) -> None:
    assert shown in image.run(*command.split())


def test_ray_starts_where_the_path_was_reset(image: Image) -> None:
    variables = {"PATH": f"{image.root}/usr/local/bin:/usr/bin:/bin", "HOME": image.variables["HOME"]}
    assert "ray, version" in image.run("bash", "-c", "ray --version", variables=variables)


def test_login_shell_that_resets_the_path_finds_the_packages(image: Image) -> None:
    """Ray runs the entrypoint of a job with the PATH of `ray start`."""
    profile = 'for file in "$0"/etc/profile.d/*.sh; do . "$file"; done; python3 -m recipe_gkd --help'
    variables = {"PATH": "/usr/bin:/bin", "HOME": image.variables["HOME"]}
    assert "gpu_smoke" in image.run("bash", "-euc", profile, str(image.root), variables=variables)


def test_caches_of_compiled_kernels_exist_and_can_be_written(image: Image) -> None:
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        folder = Path(image.variables[name])
        assert folder.is_relative_to(image.root) and os.access(folder, os.W_OK)
