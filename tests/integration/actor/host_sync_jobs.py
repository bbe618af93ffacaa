"""Jobs that record the operations of an update for which the host would wait for a GPU."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from tests._support.tiny_models import started, update

WAITS = (
    "aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.masked_select", "aten.unique",
    "aten._unique", "aten.bincount", "aten.repeat_interleave.Tensor",
)  # fmt: skip
"""Operations whose result, or its size, is read on the host."""
INDEXING = ("aten.index.Tensor", "aten.index_put", "aten._index_put")


class RecordWaits(TorchDispatchMode):
    """Records each operation that would wait for a GPU, with the lines of the project that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_mask = name.startswith(INDEXING) and any(i is not None and i.dtype == torch.bool for i in args[1])
        is_list = (
            name.startswith("aten.lift_fresh") and args[0].ndim > 0
        )  # Python numbers that are copied to the device
        if is_mask or is_list or name.startswith(WAITS):
            frames = [frame for frame in traceback.extract_stack() if "/recipe_gkd/" in frame.filename]
            lines = [f"{frame.filename.partition('/recipe_gkd/')[2]}: {frame.line}" for frame in frames[-2:]]
            self.found[" > ".join([*lines, name])] += 1
        return func(*args, **(kwargs or {}))


def record_waits(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> tuple[float, dict[str, int]]:
    """Return the number of micro-batches of an update, and how often each operation waits in their passes."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)  # allocates and builds tables
        run: Callable[..., Any] = actor.backend.accumulate
        recorded = RecordWaits()

        def accumulate(*args: Any) -> Any:
            with recorded:
                return run(*args)

        with mock.patch.object(actor.backend, "accumulate", accumulate):
            metrics = update(actor, batch, 1)
        return metrics["actor/micro_batches"], dict(recorded.found)
