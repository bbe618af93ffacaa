"""Checks of a machine before engines start on it: CUDA driver, compiler, headers, shared memory and disk space.

The checks import neither torch nor vLLM and take less than a second on most machines, so that a mistake is reported
before an engine has loaded a model. The trainer runs :func:`find_problems` on every node that gets workers, and the
start scripts of the teacher run it by ``python -m teacher.machine_checks``.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from teacher.common.sizes import GIB, MIB, size_text

MIN_DRIVER = {12: 525, 13: 580}
"""Major version of CUDA -> first release of NVIDIA's driver that supports it (CUDA Toolkit release notes)."""
MIN_FREE_BYTES = {"cpu": 100 * MIB, "cuda": 2 * GIB}
"""Free disk space that a start needs: log files of Ray, and on CUDA the compiled kernels of vLLM, Triton and torch."""
MIN_SHARED_BYTES = GIB
"""Size of /dev/shm on CUDA, where Ray keeps objects, and NCCL and vLLM their buffers. Docker's default is 64 MiB."""
CUDA_DEADLINE_S = 60.0
"""Deadline of the initialization of CUDA. Without the persistence daemon it takes seconds per GPU."""

_DRIVER_RELEASE = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")

# Run in a separate process: a process that has initialized CUDA must not fork, and initialization can hang.
_CUDA_PROGRAM = """
import ctypes, json
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"error": str(error)}))
else:
    version, text = ctypes.c_int(), ctypes.c_char_p()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    status = cuda.cuInit(0)
    cuda.cuGetErrorString(status, ctypes.byref(text))
    print(json.dumps({"version": version.value, "status": status, "text": (text.value or b"").decode()}))
"""
_CUDA_REMEDIES = {
    100: "check `nvidia-smi`, and that the container was started with its GPUs (--gpus all)",
    802: "start nvidia-fabricmanager of the driver's version, and check `nvidia-smi -q | grep -A 2 Fabric`",
    803: "the kernel module and the libraries of the driver differ, so reboot the machine after the driver update",
    804: "this GPU does not support the package cuda-compat, so remove it and update the driver instead",
}


def find_problems(device: str, folders: Mapping[str, str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a message for each problem that would make workers fail on this machine.

    Args:
        device: ``"cuda"`` or ``"cpu"``. On a CPU only the disk space is checked.
        folders: Purpose -> folder that must be writable and have free space. Folders may not exist yet.
        environment: Environment variables that the workers get in addition to this process's.

    Returns:
        Messages that state what was found, what is expected and what to do.
    """
    variables = {**os.environ, **(environment or {})}
    needed = dict(folders)
    problems = []
    if device == "cuda":
        needed = cache_folders(variables) | needed
        problems += [*cuda_problems(variables), *compiler_problems(variables), *shared_memory_problems()]
    return [*problems, *disk_problems(needed, MIN_FREE_BYTES[device])]


def cuda_problems(variables: Mapping[str, str]) -> list[str]:
    """Compare the CUDA driver with the CUDA version of the installed torch, and initialize the driver.

    Args:
        variables: Environment of the workers.
    """
    built_for = torch_cuda_version()
    if built_for is None:
        return [
            f"the torch of {sys.executable} has no CUDA support or is missing; use the Python of a GPU installation "
            "(PYTHON=... for the scripts, which else take .venv/bin/python), or install it with: pip install -c "
            "constraints/gpu.txt -e '.[gpu]'"
        ]
    found = _initialize_cuda(variables)
    expected = f"expected driver {MIN_DRIVER.get(_major(built_for), 'of that CUDA version')} or newer, because torch "
    expected += f"is built for CUDA {built_for}"
    if "error" in found:
        return [f"the CUDA driver cannot be used ({found['error']}); {expected}; check `nvidia-smi`"]
    version, status = int(found["version"]), int(found["status"])
    if version // 1000 < _major(built_for):
        release = driver_release()
        named = f"NVIDIA driver {release}" if release else "an NVIDIA driver"
        return [
            f"found {named} for CUDA {version // 1000}.{version % 1000 // 10}, {expected}; update the driver, or on a "
            f"data-center GPU install the package cuda-compat of CUDA {_major(built_for)}"
        ]
    if status:
        remedy = _CUDA_REMEDIES.get(status, "check `nvidia-smi` and `dmesg`")
        return [f"CUDA cannot be initialized: error {status}, {found['text'] or 'unknown'}; {remedy}"]
    return []


def compiler_problems(variables: Mapping[str, str]) -> list[str]:
    """Check the C compiler and Python's headers, with which Triton compiles the launchers of its kernels.

    The compiler is chosen as in ``triton/runtime/build.py``.
    """
    problems = []
    path = variables.get("PATH")
    named = variables.get("CC")
    compiler = (
        shutil.which(named, path=path) if named else shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    )
    if compiler is None:
        found = f"CC={named}, which cannot be run" if named else "no C compiler (gcc or clang in PATH, or CC)"
        problems.append(f"found {found}, expected one for Triton's kernels, which vLLM needs; install gcc, or set CC")
    scheme = sysconfig.get_default_scheme()
    header = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]) / "Python.h"
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        problems.append(
            f"found no {header}, expected Python's headers for Triton's kernels, which vLLM needs; install {package} "
            f"(Red Hat: {package}el)"
        )
    return problems


def shared_memory_problems() -> list[str]:
    """Check the size of /dev/shm."""
    try:
        total = shutil.disk_usage(SHARED_MEMORY).total
    except OSError as error:
        return [
            f"{SHARED_MEMORY} cannot be used ({error.strerror}), but Ray, NCCL and vLLM keep buffers there; mount it"
        ]
    if total >= MIN_SHARED_BYTES:
        return []
    return [
        f"{SHARED_MEMORY} has {size_text(total)}, expected at least {size_text(MIN_SHARED_BYTES)} for buffers of Ray, "
        "NCCL and vLLM; start the container with --shm-size=64g or --ipc=host"
    ]


def cache_folders(variables: Mapping[str, str]) -> dict[str, str]:
    """Return purpose -> folder of the files that vLLM, Triton, torch and FlashInfer compile at the first start."""
    home = variables.get("HOME") or os.path.expanduser("~")
    cache = variables.get("XDG_CACHE_HOME") or f"{home}/.cache"
    temporary = variables.get("TMPDIR") or tempfile.gettempdir()
    triton = variables.get("TRITON_CACHE_DIR") or f"{variables.get('TRITON_HOME') or home}/.triton/cache"
    return {
        "VLLM_CACHE_ROOT": variables.get("VLLM_CACHE_ROOT") or f"{cache}/vllm",
        "TRITON_CACHE_DIR": triton,
        "FLASHINFER_WORKSPACE_BASE": f"{variables.get('FLASHINFER_WORKSPACE_BASE') or home}/.cache/flashinfer",
        "TORCHINDUCTOR_CACHE_DIR": variables.get("TORCHINDUCTOR_CACHE_DIR") or temporary,
        "TMPDIR": temporary,
    }


def disk_problems(folders: Mapping[str, str], min_free_bytes: int) -> list[str]:
    """Check that folders can be written and that their disks have free space. Each disk is reported once.

    Args:
        folders: Purpose -> folder.
        min_free_bytes: Free space that each disk must have.
    """
    problems, small = [], dict[int, tuple[int, list[str]]]()
    for purpose, folder in folders.items():
        label = f"{folder} ({purpose})"
        try:
            existing = _nearest_existing(Path(os.path.expanduser(folder)))
            free, disk = shutil.disk_usage(existing).free, existing.stat().st_dev
        except OSError as error:
            problems.append(f"{label} cannot be used: {error.strerror}; choose another folder")
            continue
        if not os.access(existing, os.W_OK | os.X_OK):
            problems.append(
                f"{label} cannot be written, because {existing} belongs to another user or is read-only; "
                "choose another folder"
            )
        elif free < min_free_bytes:
            small.setdefault(disk, (free, []))[1].append(label)
    return problems + [
        f"the disk of {', '.join(labels)} has {size_text(free)} free, expected at least {size_text(min_free_bytes)}; "
        "free some space, or choose another folder"
        for free, labels in small.values()
    ]


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch is built for, None for a CPU build. torch is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return version


def driver_release() -> str | None:
    """Return the release of NVIDIA's kernel module, such as ``580.95.05``. None if it is not loaded."""
    try:
        text = _DRIVER_RELEASE.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"Kernel Module\b.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return match[1] if match else None


def _initialize_cuda(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return ``version``, ``status`` and ``text`` of the driver, or ``error``."""
    # Ray hides all GPUs from a process that requests none by an empty list.
    environment = {name: value for name, value in variables.items() if (name, value) != ("CUDA_VISIBLE_DEVICES", "")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CUDA_PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            timeout=CUDA_DEADLINE_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"its initialization did not end within {CUDA_DEADLINE_S:g} s"}
    except (OSError, subprocess.CalledProcessError) as error:
        return {"error": f"its initialization failed: {error}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)


def _major(version: str) -> int:
    return int(version.split(".")[0])
