"""Rows of a sharded weight that are on this rank."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_rows(weight: Tensor) -> tuple[Tensor, int]:
    """Return a view of this rank's rows of a weight, and the index of the first in the complete weight."""
    if not isinstance(weight, DTensor):
        return weight.detach(), 0
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    local: Tensor = weight.to_local()
    return local.detach(), offset[0]
