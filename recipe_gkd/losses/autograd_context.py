"""Type of the context of autograd functions, which torch does not give."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SavedTensors(Protocol):
    """Context of an autograd function that keeps only tensors for its backward pass."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors until the backward pass."""
