"""Checks of a machine before engines start. A GPU driver is imitated by the output of the process that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from teacher.common import machine_checks
from teacher.common.machine_checks import (
    compiler_problems,
    cuda_problems,
    disk_problems,
    driver_release,
    find_problems,
    shared_memory_problems,
    torch_cuda_version,
)

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Reply of the driver, for a torch that is built for CUDA 13.0."""
    found: dict[str, Any] = {"version": 13000, "status": 0, "text": "no error"}
    release = tmp_path / "version"
    release.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\n"
        "GCC version:  gcc version 12.2.0\n"
    )

    def start(_: object, *, env: Mapping[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        found["visible"] = env.get("CUDA_VISIBLE_DEVICES")
        return subprocess.CompletedProcess([], 0, stdout=json.dumps(found))

    monkeypatch.setattr(machine_checks, "_DRIVER_RELEASE", release)
    monkeypatch.setattr(machine_checks, "torch_cuda_version", lambda: "13.0")
    monkeypatch.setattr(machine_checks.subprocess, "run", start)
    return found


class TestCuda:
    @pytest.mark.parametrize("version", [13000, 13010])
    def test_driver_of_the_same_major_version_has_no_problem(self, driver: dict[str, Any], version: int) -> None:
        driver["version"] = version
        assert cuda_problems({}) == []

    def test_old_driver_names_release_and_requirement(self, driver: dict[str, Any]) -> None:
        driver["version"] = 12080
        [problem] = cuda_problems({})
        assert "found NVIDIA driver 570.86.15 for CUDA 12.8, expected driver 580 or newer" in problem
        assert "torch is built for CUDA 13.0; update the driver" in problem

    @pytest.mark.parametrize(
        ("status", "remedy"), [(802, "start nvidia-fabricmanager"), (100, "--gpus all"), (999, "dmesg")]
    )
    def test_failed_initialization_names_error_and_remedy(
        self, driver: dict[str, Any], status: int, remedy: str
    ) -> None:
        driver |= {"status": status, "text": "not yet initialized"}
        [problem] = cuda_problems({})
        assert f"error {status}, not yet initialized" in problem and remedy in problem

    def test_gpus_that_ray_hides_are_visible_to_the_check(self, driver: dict[str, Any]) -> None:
        cuda_problems({"CUDA_VISIBLE_DEVICES": ""})
        assert driver["visible"] is None
        cuda_problems({"CUDA_VISIBLE_DEVICES": "3"})
        assert driver["visible"] == "3"

    def test_hanging_initialization_is_reported(self, driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        def hang(command: object, *, timeout: float, **_: object) -> None:
            raise subprocess.TimeoutExpired(str(command), timeout)

        monkeypatch.setattr(machine_checks.subprocess, "run", hang)
        [problem] = cuda_problems({})
        assert "did not end within 60 s" in problem and "580" in problem

    def test_cpu_build_of_torch_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_checks, "torch_cuda_version", lambda: None)
        [problem] = cuda_problems({})
        assert f"the torch of {sys.executable} has no CUDA support" in problem
        assert "PYTHON=" in problem and "pip install -c constraints/gpu.txt" in problem

    def test_process_reports_a_missing_driver(self) -> None:
        """The real program, without a driver: a library folder that is empty."""
        if Path("/proc/driver/nvidia/version").exists():
            pytest.skip("this machine has an NVIDIA driver")
        found = machine_checks._initialize_cuda(dict(os.environ))
        assert "libcuda.so.1" in found["error"]

    @pytest.mark.gpu
    def test_real_driver_has_no_problem(self) -> None:
        if driver_release() is None:
            pytest.skip("needs an NVIDIA driver")
        assert cuda_problems(dict(os.environ)) == []

    def test_versions_without_torch_import(self) -> None:
        """torch/version.py is read; torch itself takes seconds."""
        code = "import sys, teacher.common.machine_checks as m; print(m.torch_cuda_version(), 'torch' in sys.modules)"
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert printed.split() == [str(torch_cuda_version()), "False"]


class TestCompiler:
    def test_gcc_or_cc_is_accepted(self, tmp_path: Path) -> None:
        for name in ("gcc", "my-compiler"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        for variables in ({"PATH": str(tmp_path)}, {"PATH": "", "CC": str(tmp_path / "my-compiler")}):
            assert not [problem for problem in compiler_problems(variables) if "compiler" in problem or "CC" in problem]

    def test_missing_compiler_and_headers_are_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_checks.sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        compiler, header = compiler_problems({"PATH": str(tmp_path)})
        assert "found no C compiler" in compiler and "install gcc" in compiler
        assert f"found no {tmp_path}/Python.h" in header and f"install python{version}-dev" in header
        (named, _) = compiler_problems({"PATH": str(tmp_path), "CC": "nowhere-cc"})
        assert "CC=nowhere-cc, which cannot be run" in named


class TestDisk:
    def test_small_shared_memory_names_docker_option(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
        [problem] = shared_memory_problems()
        assert "/dev/shm has 64.0 MiB, expected at least 1.00 GiB" in problem and "--shm-size" in problem

    def test_full_disk_is_reported_once_for_all_its_folders(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 50 << 20))
        [problem] = disk_problems({"caches": f"{tmp_path}/new/a", "logs": f"{tmp_path}/b"}, 100 << 20)
        assert f"the disk of {tmp_path}/new/a (caches), {tmp_path}/b (logs) has 50.0 MiB free" in problem
        assert disk_problems({"caches": str(tmp_path)}, 50 << 20) == []

    def test_unwritable_folder_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_checks.os, "access", lambda path, _: Path(path) != tmp_path)
        [problem] = disk_problems({"VLLM_CACHE_ROOT": f"{tmp_path}/vllm"}, 0)
        assert f"{tmp_path}/vllm (VLLM_CACHE_ROOT) cannot be written, because {tmp_path}" in problem


class TestFindProblems:
    def test_cpu_checks_only_the_given_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("cuda_problems", "compiler_problems", "shared_memory_problems", "cache_folders"):
            monkeypatch.setattr(machine_checks, name, lambda *_: pytest.fail("not needed on a CPU"))
        assert find_problems("cpu", {"logs": str(tmp_path)}) == []

    def test_cuda_checks_caches_with_the_variables_of_the_workers(
        self, driver: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checked: dict[str, str] = {}

        def record(folders: Mapping[str, str], _: int) -> list[str]:
            checked.update(folders)
            return []

        monkeypatch.setattr(machine_checks, "disk_problems", record)
        monkeypatch.setattr(machine_checks, "compiler_problems", lambda _: ["no compiler"])
        monkeypatch.setattr(machine_checks, "shared_memory_problems", lambda: ["small"])
        driver["status"] = 100
        found = find_problems("cuda", {"logs": "/logs"}, {"TRITON_CACHE_DIR": "/fast/triton", "VLLM_CACHE_ROOT": "/v"})
        assert len(found) == 3 and "error 100" in found[0]
        assert checked["TRITON_CACHE_DIR"] == "/fast/triton" and checked["VLLM_CACHE_ROOT"] == "/v"
        assert checked["logs"] == "/logs" and checked["FLASHINFER_WORKSPACE_BASE"].endswith("/.cache/flashinfer")
