"""Data types in which a device computes fast. A CPU without instructions for a 16-bit type emulates its products."""

from __future__ import annotations

import json
from pathlib import Path

_CPU_FLAGS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""Data type -> capabilities of a CPU (x86, ARM) with which matrix products of this type are fast."""


def is_fast(dtype: str, device: str) -> bool:
    """Return False if the device is a CPU that emulates matrix products of a 16-bit data type. Imports torch for a CPU.

    Args:
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        device: ``"cuda"``, or ``"cpu"`` for the CPU of this machine.
    """
    if device == "cuda" or dtype not in _CPU_FLAGS:
        return True
    import torch

    found = torch.cpu.get_capabilities()
    return any(found.get(flag) for flag in _CPU_FLAGS[dtype])


def fast_dtype(dtype: str, device: str) -> str:
    """Return a data type, or ``"float32"`` if the device emulates it; see :func:`is_fast`."""
    return dtype if is_fast(dtype, device) else "float32"


def engine_dtype(setting: str, folder: Path, device: str) -> str:
    """Return the data type of a vLLM engine with weights from a folder.

    Args:
        setting: ``"auto"``, or a data type, which is returned.
        folder: Model folder.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        For ``"auto"`` on CUDA ``"auto"``, so that vLLM decides: the type of the weights, or bfloat16 if that is
        float32. On a CPU the same type, or float32 if the CPU emulates it.
    """
    if setting != "auto" or device == "cuda":
        return setting
    if needs_bfloat16(folder):
        return "bfloat16"
    stored = [section.get(key) for section in _sections(folder) for key in ("dtype", "torch_dtype")]
    return fast_dtype(next((dtype for dtype in stored if dtype in _CPU_FLAGS), "bfloat16"), device)


def needs_bfloat16(folder: Path) -> bool:
    """Return True if vLLM's CPU build computes the model in bfloat16 only, because it has gated delta nets."""
    return any("linear_num_value_heads" in section for section in _sections(folder))


def _sections(folder: Path) -> list[dict[str, object]]:
    """Return ``config.json`` and its text section; nothing if it cannot be read, which others report."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    found = [values, values.get("text_config")] if isinstance(values, dict) else []
    return [section for section in found if isinstance(section, dict)]
