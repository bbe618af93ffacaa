"""Groups of NCCL, which gloo provides. ``device.cpp`` passes it the memory of device tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_GLOO = "cpu:gloo,cuda:gloo"


def accept_nccl() -> None:
    """Replace the functions that create groups."""
    init_process_group, new_group = distributed_c10d.init_process_group, distributed_c10d.new_group

    def init(backend: str | None = None, *arguments: Any, device_id: Any = None, **options: Any) -> None:
        init_process_group(_GLOO if backend in (None, "nccl") else backend, *arguments, **options)

    def new(*arguments: Any, backend: str | None = None, pg_options: Any = None, **options: Any) -> Any:
        options.pop("device_id", None)
        return new_group(*arguments, backend=_GLOO if backend == "nccl" else backend, **options)

    for module in (dist, distributed_c10d):
        module.init_process_group, module.new_group = init, new  # type: ignore[attr-defined]
    dist.ProcessGroupNCCL = NcclGroup  # type: ignore[attr-defined,misc]


class NcclGroup:
    """The broadcast of a ``ProcessGroupNCCL``, whose other methods the project does not call."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, world: int, options: Any) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, world, options._timeout)

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        """Start a broadcast. Gloo obeys its timeout, NCCL would not."""
        torch.ops.simulated_gpu.launch()
        return self._gloo.broadcast([torch.ops.simulated_gpu.on_host(each) for each in tensors], options)

    def abort(self) -> None:
        """Close the group."""
        self._gloo.abort()
