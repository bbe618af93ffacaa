"""The lock of a GPU installation and the Dockerfile that uses it. Nothing is installed or downloaded."""

from __future__ import annotations

import configparser
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests._support.dockerfile import docker_instructions
from tests._support.repository import REPO

PYTHONS = ("3.11", "3.12")


def environment(python: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def requirements(*extras: str) -> list[Requirement]:
    """Return the requirements of setup.cfg and of these extras."""
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    parts = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    lines = [line for part in parts for line in part.splitlines() if line.strip() and not line.startswith("#")]
    return [Requirement(line) for line in lines]


def locked(python: str) -> dict[str, Version]:
    """Return package -> version of constraints/gpu.txt for a Python."""
    lines = (REPO / "constraints" / "gpu.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    chosen = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment(python))]
    versions: dict[str, Version] = {}
    for pin in chosen:
        [specifier] = pin.specifier
        assert specifier.operator == "==" and pin.url is None and canonicalize_name(pin.name) not in versions, pin
        versions[canonicalize_name(pin.name)] = Version(specifier.version)
    return versions


def unsatisfied(needed: list[Requirement], python: str) -> list[str]:
    versions = locked(python)
    return [
        f"{requirement}: {versions.get(canonicalize_name(requirement.name))}"
        for requirement in needed
        if requirement.marker is None or requirement.marker.evaluate(environment(python))
        if canonicalize_name(requirement.name) not in versions
        or not requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True)
    ]


def docker_pip_commands() -> list[list[str]]:
    """Return the arguments of each `pip install` of this project in the Dockerfile."""
    runs = [arguments for name, arguments in docker_instructions() if name == "RUN"]
    found = [command for run in runs for command in re.findall(r"\bpip install ([^;&|]+)", run)]
    return [shlex.split(command) for command in found if ".[" in command]


def extras_of(arguments: list[str]) -> list[str]:
    [target] = [argument for argument in arguments if argument.startswith(".[")]
    return target[2:-1].split(",")


class TestLock:
    @pytest.mark.parametrize("python", PYTHONS)
    def test_lock_satisfies_every_direct_requirement(self, python: str) -> None:
        assert unsatisfied(requirements("gpu", "dev"), python) == []

    @pytest.mark.parametrize("python", PYTHONS)
    def test_lock_satisfies_transitive_requirements_installed_here(self, python: str) -> None:
        """Requirements of the packages that the CPU installation has in the same version."""
        from importlib.metadata import distributions

        versions = locked(python)
        same = [
            found
            for found in distributions()
            if versions.get(canonicalize_name(found.metadata["Name"])) == Version(found.version)
        ]
        assert len(same) > 100
        needed = [Requirement(line) for found in same for line in found.requires or () if "extra ==" not in line]
        assert unsatisfied(needed, python) == []

    def test_lock_names_no_index_and_no_file(self) -> None:
        text = (REPO / "constraints" / "gpu.txt").read_text(encoding="utf-8")
        assert not re.search(r"://|--|@|sha256", text)

    def test_lock_has_the_cuda_version_that_the_readme_and_the_checks_expect(self) -> None:
        from teacher.common.machine_checks import MIN_DRIVER

        cuda = locked("3.12")["cuda-toolkit"].major
        assert f"driver {MIN_DRIVER[cuda]} or newer" in (REPO / "constraints" / "gpu.txt").read_text(encoding="utf-8")
        base = dict(argument.split("=", 1) for name, argument in docker_instructions() if name == "ARG")["BASE"]
        assert re.search(rf"cuda:{cuda}\.", base)

    def test_lock_script_refuses_an_unknown_argument(self) -> None:
        refused = subprocess.run(
            ["bash", str(REPO / "launch" / "lock.sh"), "gqu"], capture_output=True, text=True, timeout=30, check=False
        )
        assert refused.returncode == 2 and "expected gpu or cpu, got 'gqu'" in refused.stderr


class TestDockerfile:
    def test_pip_lines_name_existing_files_and_extras(self) -> None:
        commands = docker_pip_commands()
        assert len(commands) == 2
        for arguments in commands:
            assert (REPO / arguments[arguments.index("-c") + 1]).is_file()
            assert requirements(*extras_of(arguments))

    def test_pip_lines_resolve_against_the_lock(self) -> None:
        """The torch extension of Transformer Engine is compiled in the image, so that the lock does not contain it."""
        [python] = {match for _, text in docker_instructions() for match in re.findall(r"python(3\.\d+)", text)}
        assert python in PYTHONS
        for arguments in docker_pip_commands():
            extras = [extra for extra in extras_of(arguments) if extra != "gpu-te"]
            assert unsatisfied(requirements(*extras), python) == []

    def test_image_has_what_the_machine_checks_expect(self) -> None:
        installed = {word for name, text in docker_instructions() if name == "RUN" for word in text.split()}
        assert {"gcc", "python3.12-dev", "python3.12-venv"} <= installed

    def test_compiled_kernels_are_kept_below_one_folder(self) -> None:
        from teacher.common.machine_checks import cache_folders

        settings = [text for name, text in docker_instructions() if name == "ENV"]
        variables = dict(pair.split("=", 1) for text in settings for pair in text.split())
        folders = cache_folders({"HOME": "/root", **variables})
        for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
            assert folders[name].startswith("/var/cache/recipe_gkd/"), name

    def test_ignored_files_are_not_needed_by_the_package(self) -> None:
        patterns = (REPO / ".dockerignore").read_text(encoding="utf-8").split()
        tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout
        tops = {Path(name).parts[0] for name in tracked.splitlines()}
        assert not [top for top in tops for pattern in patterns if fnmatch(top, pattern)]

    @pytest.mark.slow
    def test_pip_dry_run_resolves(self, tmp_path: Path) -> None:
        """Resolve the requirements with the index that pip is configured to use."""
        needed = tmp_path / "requirements.txt"
        needed.write_text("\n".join(map(str, requirements("gpu"))), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q"]
        reachable = subprocess.run([*pip, "--no-deps", "packaging"], capture_output=True, timeout=120, check=False)
        if reachable.returncode:
            pytest.skip("needs a package index that pip can reach")
        lock = ["-c", str(REPO / "constraints" / "gpu.txt")]
        resolved = subprocess.run([*pip, *lock, "-r", str(needed)], capture_output=True, text=True, check=False)
        assert resolved.returncode == 0, resolved.stderr
