"""Compilation of ``device.cpp``. It must not import torch."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from tests._support.repository import REPO

LIBRARY = "SIMULATED_GPU_LIBRARY"
"""Environment variable with the path of the library."""
_SOURCE = Path(__file__).with_name("device.cpp")
_TIMEOUT_S = 120


def compiler() -> str | None:
    """Return the path of the C++ compiler; None if there is none."""
    return shutil.which("g++")


def library() -> Path:
    """Return the compiled library. It is compiled once for each source and version of torch, in about 10 s.

    Raises:
        RuntimeError: The compiler failed.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{metadata.version('torch')} {torch}".encode()).hexdigest()[:16]
    result = REPO / "build" / "simulated_gpu" / f"{key}.so"
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        _compile(torch, result)
    return result


def _compile(torch: Path, result: Path) -> None:
    unfinished = result.with_suffix(".unfinished")
    includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    links = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *includes, str(_SOURCE), "-o", str(unfinished), *links]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if ended.returncode:
        raise RuntimeError(f"g++ could not compile {_SOURCE.name}:\n{ended.stderr[-4000:]}")
    unfinished.replace(result)
