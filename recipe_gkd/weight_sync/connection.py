"""Driver's view of the transport between the actor's rank 0 and the rollout workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.runtime.threads import start_in_thread
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.deadlines import merge_deadline_errors
from recipe_gkd.weight_sync.spec import RemoteGroup, WeightSyncSpec
from recipe_gkd.weight_sync.store import interrupt


class WeightConnection:
    """A transport that connects both pools.

    Args:
        actors: Actor pool; its rank 0 sends.
        rollouts: Rollout pool. Each worker has ``spec.tensor_parallel_size`` ranks of the transport.
        spec: Settings.

    Attributes:
        meta: Tensors that the actor exports; None before :meth:`open`.
    """

    def __init__(self, actors: RemoteGroup, rollouts: RemoteGroup, spec: WeightSyncSpec) -> None:
        self._actors, self._rollouts, self._spec = actors, rollouts, spec
        self._store = ("", 0)  # host and port
        self.meta: list[TensorMeta] | None = None

    async def open(self) -> list[TensorMeta]:
        """Open a store on the actor's rank 0, connect all ranks, and return the tensors that the actor exports.

        Raises:
            WeightSyncError: A rank failed, or its worker died.
            DeadlineError: A worker did not answer.
        """
        timeout_s, size = self._spec.rpc_timeout_s, self._spec.tensor_parallel_size
        host, port = self._store = await self._actors.call_one(
            0, "open_weight_store", timeout_s=timeout_s, phase="weight sync, open the store"
        )
        labels, transport, phase = self._labels(), self._spec.transport, "weight sync, connect"
        joins = [(host, port, 1 + rank * size, labels, transport) for rank in range(len(self._rollouts))]
        await self.call_both(
            phase,
            self._actors.call_one(0, "connect_weight_transport", labels, transport, timeout_s=timeout_s, phase=phase),
            self._rollouts.call_each("open_weight_transport", joins, timeout_s=timeout_s, phase=phase),
        )
        metas = await self._actors.call("weights_meta", timeout_s=timeout_s, phase="weight sync, list the weights")
        self.meta = metas[0]
        return metas[0]

    def discard(self) -> None:
        """Forget the transport. The next update needs a new one."""
        self.meta = None

    async def call_both(self, phase: str, *calls: Awaitable[Any]) -> list[Any]:
        """Await calls of both pools that wait for each other, and return their results.

        If one call fails, the other pool's ranks are interrupted, and its call is awaited until its own deadline. Only
        that deadline identifies a frozen actor rank: to the rollout workers it looks like a sender without data.

        Args:
            phase: Phase of the sync, for error messages.
            calls: Calls with deadlines.

        Raises:
            WeightSyncError: A call failed. The message contains all errors. The cause names all workers that did not
                answer, if there are any.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                reasons = "; ".join(str(task.exception()) for task in done if task.exception())
                # Not awaited: it needs 2 s if the process of the store is stopped.
                start_in_thread(interrupt, *self._store, reasons)
                await asyncio.wait(pending)
        finally:
            for task in tasks:
                task.cancel()
        errors = list(dict.fromkeys(error for task in tasks if (error := task.exception())))
        if unexpected := [error for error in errors if not isinstance(error, GkdError)]:
            raise unexpected[0]
        if errors:
            messages = " | ".join(dict.fromkeys(str(error) for error in errors))
            raise WeightSyncError(f"{phase}: {messages}") from (merge_deadline_errors(errors) or errors[0])
        return [task.result() for task in tasks]

    def _labels(self) -> list[str]:
        """Return the names of all transport ranks."""
        size = self._spec.tensor_parallel_size
        return [self._actors.label(0)] + [
            self._rollouts.label(rank) + (f", tensor rank {tensor_rank}" if size > 1 else "")
            for rank in range(len(self._rollouts))
            for tensor_rank in range(size)
        ]
