"""Jobs that record the operations of an update for which the host would wait for a GPU."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
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
COPIES = ("tolist", "cpu", "numpy")
"""Methods that copy to the host. On a CPU they dispatch no operation."""
INDEXING = ("aten.index.Tensor", "aten.index_put", "aten._index_put")


class RecordWaits(TorchDispatchMode):
    """Records each operation that would wait for a GPU, with the lines of the project that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.is_active = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_mask = name.startswith(INDEXING) and any(i is not None and i.dtype == torch.bool for i in args[1])
        is_list = (
            name.startswith("aten.lift_fresh") and args[0].ndim > 0
        )  # Python numbers that are copied to the device
        if is_mask or is_list or name.startswith(WAITS):
            self._note(name)
        return func(*args, **(kwargs or {}))

    def recording(self, name: str) -> Callable[..., Any]:
        """Return a method of tensors that is recorded inside of this mode."""
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_active and threading.current_thread() is threading.main_thread():  # not the thread that packs
                self._note(name)
            return original(tensor, *args, **kwargs)

        return method

    def synchronize(self, device: Any = None) -> None:
        """Record a call of ``torch.cuda.synchronize``, which has no effect on a CPU."""
        if self.is_active:
            self._note("synchronize")

    def _note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/recipe_gkd/" in frame.filename]
        lines = [f"{frame.filename.partition('/recipe_gkd/')[2]}: {frame.line}" for frame in frames[-2:]]
        self.found[" > ".join([*lines, name])] += 1


def record_waits(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> tuple[float, dict[str, int]]:
    """Return the number of micro-batches of an update, and how often each operation waits in their passes."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)  # allocates and builds tables
        run: Callable[..., Any] = actor.backend.accumulate
        recorded = RecordWaits()

        def accumulate(*args: Any, **named: Any) -> Any:
            recorded.is_active = True
            try:
                with recorded:
                    return run(*args, **named)
            finally:
                recorded.is_active = False

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(actor.backend, "accumulate", accumulate))
            stack.enter_context(mock.patch.object(torch.cuda, "synchronize", recorded.synchronize))
            for name in COPIES:
                stack.enter_context(mock.patch.object(torch.Tensor, name, recorded.recording(name)))
            metrics = update(actor, batch, 1)
        return metrics["actor/micro_batches"], dict(recorded.found)
