"""Selection of the kernel backend: PyTorch, or Triton on a GPU."""

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
from recipe_gkd.losses.logits_query import GradientSpec, SoftmaxSpec

log = logging.getLogger(__name__)

KERNEL_BACKENDS = ("auto", "torch", "triton")
KEY = "gkd.kernel_backend"
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CPU_CHUNK_ELEMENTS = 1 << 20  # stays in the cache of one core
CUDA_CHUNK_ELEMENTS = 1 << 26  # small beside the memory of a GPU
_layers_use_triton = True  # the modules of the layers are built by Megatron, which knows no key of this project


class KernelBackend(Protocol):
    """The two operations that touch every logit. :mod:`~recipe_gkd.losses.torch_kernels` documents them."""

    def tail_sums(self, logits_RW: Tensor, softmaxes: Sequence[SoftmaxSpec], dtype: torch.dtype) -> Tensor:
        """Return the sums over the ids outside each softmax's support, [R, H, 3]."""

    def write_gradient(self, out_RW: Tensor, logits_RW: Tensor, gradient: GradientSpec) -> None:
        """Write the gradient in the logits to ``out_RW``."""


def select_backend(tensor: Tensor, choice: str = "auto") -> KernelBackend:
    """Return the kernel backend for the logits of one model.

    Args:
        tensor: Logits, or any tensor of their device and dtype.
        choice: ``gkd.kernel_backend``. ``auto`` is Triton on a GPU where it is installed and compiles, else PyTorch.

    Raises:
        ConfigError: ``choice`` is unknown, or ``triton`` cannot run on this tensor.
    """
    if choice not in KERNEL_BACKENDS:
        raise ConfigError(f"{KEY}: got {choice!r}, expected one of {', '.join(KERNEL_BACKENDS)}", keys=(KEY,))
    if choice == "torch" or (choice == "auto" and not (tensor.is_cuda and tensor.dtype in TRITON_DTYPES)):
        return torch_kernels
    backend = _load_triton()
    if choice == "auto":
        return backend or torch_kernels
    if backend is None:
        raise ConfigError(
            f"{KEY}=triton, but Triton cannot be imported or cannot compile here",
            remedy=f"repair the installation, or set {KEY}=auto",
            keys=(KEY,),
        )
    if tensor.dtype not in TRITON_DTYPES:
        raise ConfigError(
            f"{KEY}=triton, but the logits are {tensor.dtype}, expected {TRITON_DTYPES}",
            remedy=f"set {KEY}=auto",
            keys=(KEY,),
        )
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{KEY}=triton, but the logits are on {tensor.device}, expected a GPU",
            remedy=f"set {KEY}=auto, or set the environment variable TRITON_INTERPRET=1 for a test",
            keys=(KEY,),
        )
    return backend


def choose_layer_kernels(choice: str) -> None:
    """Set the kernels of the layers in this process.

    Args:
        choice: ``gkd.kernel_backend``.
    """
    global _layers_use_triton
    _layers_use_triton = choice != "torch"


def runs_triton(tensor: Tensor) -> bool:
    """Return True if a layer may use Triton: the tensor is on a GPU, and Triton is chosen and compiles kernels here."""
    is_readable = tensor.is_cuda and tensor.dtype in TRITON_DTYPES
    return is_readable and _layers_use_triton and _load_triton() is not None


def chunk_positions(logits_TW: Tensor, choice: str = "auto") -> int:
    """Return the number of positions per call of the backend.

    Triton processes all positions in one call, because its kernels allocate nothing of the size of the logits.
    """
    if select_backend(logits_TW, choice) is not torch_kernels:
        return max(1, len(logits_TW))
    elements = CUDA_CHUNK_ELEMENTS if logits_TW.is_cuda else CPU_CHUNK_ELEMENTS
    return max(1, elements // max(logits_TW.shape[1], 1))


@functools.cache
def _load_triton() -> KernelBackend | None:
    """Return the Triton backend; None if it is not installed or cannot compile on this machine."""
    try:
        from recipe_gkd.losses import triton_backend
    except ImportError:
        return None
    if torch.cuda.is_available():
        softmax = SoftmaxSpec(
            columns_TK=torch.zeros(1, 0, dtype=torch.int64, device="cuda"),
            is_local_TK=torch.zeros(1, 0, dtype=torch.bool, device="cuda"),
            real_columns=1,
            inverse_temperature=1.0,
        )
        try:
            triton_backend.tail_sums(torch.zeros(1, 1, device="cuda"), [softmax], torch.float32)
        except Exception as error:  # noqa: BLE001  # a compiler can raise any exception
            log.warning(
                "Triton cannot compile a kernel (%s). Losses and layers use the slower PyTorch kernels; install a C "
                "compiler, or set %s=torch to silence this warning",
                error,
                KEY,
            )
            return None
    return triton_backend
