"""Which arithmetic reads the logits: PyTorch's, or on a GPU the kernels in Triton, which is never required."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from recipe_gkd.errors import ConfigError
from recipe_gkd.losses import torch_kernels
from recipe_gkd.losses.logits_query import Backward, SoftmaxSpec

log = logging.getLogger(__name__)

CHOICE = "RECIPE_GKD_ARITHMETIC"
"""Environment variable: ``torch`` or ``triton`` for all tensors, for tests and benchmarks; ``auto`` if it is unset."""
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class KernelBackend(Protocol):
    """What :mod:`~recipe_gkd.losses.torch_kernels` documents."""

    def tail_sums(self, logits_CW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> Tensor: ...

    def write_gradient(self, out_CW: Tensor, logits_CW: Tensor, wanted: Backward) -> None: ...


def select_backend(tensor: Tensor, choice: str | None = None) -> KernelBackend:
    """``choice``: ``auto`` (Triton on a GPU, if it is installed), ``torch`` or ``triton``; None: what the environment
    says. Raises ConfigError for others, and for ``triton`` where that cannot work.
    """
    choice = choice or os.environ.get(CHOICE) or "auto"
    if choice not in ("auto", "torch", "triton"):
        raise ConfigError(f"{CHOICE}: got {choice!r}, expected 'auto', 'torch' or 'triton'")
    if choice == "torch" or (choice == "auto" and not (tensor.is_cuda and tensor.dtype in TRITON_DTYPES)):
        return torch_kernels
    found = _triton()
    if choice == "auto":
        return found or torch_kernels
    if found is None:
        raise ConfigError(f"{CHOICE}=triton, but the package triton cannot be imported: install it, or unset {CHOICE}")
    if tensor.dtype not in TRITON_DTYPES:
        raise ConfigError(
            f"{CHOICE}=triton, but the logits are {tensor.dtype}, expected {TRITON_DTYPES}: unset {CHOICE}"
        )
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{CHOICE}=triton, but the logits are on {tensor.device}, expected a GPU: unset {CHOICE}, or set "
            "TRITON_INTERPRET=1 for a test"
        )
    return found


def chunk_positions(logits_TW: Tensor) -> int:
    """Positions to take at a time: what stays in a core's cache, what is little of a GPU's memory, or all."""
    if select_backend(logits_TW) is not torch_kernels:
        return max(1, len(logits_TW))  # the kernels allocate nothing of the logits' size
    return max(1, (1 << 26 if logits_TW.is_cuda else 1 << 20) // max(logits_TW.shape[1], 1))


@functools.cache
def _triton() -> KernelBackend | None:
    """None if it is not installed, or cannot compile here (there is no C compiler, say): it is never required."""
    try:
        from recipe_gkd.losses import triton_backend
    except ImportError:
        return None
    if torch.cuda.is_available():
        head = SoftmaxSpec(
            columns_TK=torch.zeros(1, 0, dtype=torch.int64, device="cuda"),
            own_TK=torch.zeros(1, 0, dtype=torch.bool, device="cuda"),
            real_columns=1,
            inverse_temperature=1.0,
        )
        try:
            triton_backend.tail_sums(torch.zeros(1, 1, device="cuda"), [head], torch.float32)
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises
            log.warning("Triton cannot be used (%s); PyTorch computes the losses, with more passes", error)
            return None
    return triton_backend
