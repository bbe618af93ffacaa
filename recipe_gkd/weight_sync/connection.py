"""Driver's view of the transport between the actor's rank 0 and the rollout workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TypeVar

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.runtime.remote_group import RemoteGroup
from recipe_gkd.runtime.threads import start_in_thread
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.failures import as_sync_error, merge_deadline_errors
from recipe_gkd.weight_sync.spec import TransportAddress, WeightReceiver, WeightSender, WeightSyncSpec
from recipe_gkd.weight_sync.store import interrupt

A = TypeVar("A")
B = TypeVar("B")


class WeightConnection:
    """A transport that connects both pools.

    Args:
        actors: Actor pool; its rank 0 sends.
        rollouts: Rollout pool. Each worker has ``spec.tensor_parallel_size`` ranks of the transport.
        spec: Settings.

    Attributes:
        meta: Tensors that the actor exports; None before :meth:`open`.
    """

    def __init__(
        self, actors: RemoteGroup[WeightSender], rollouts: RemoteGroup[WeightReceiver], spec: WeightSyncSpec
    ) -> None:
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
            0, WeightSender.open_weight_store, timeout_s=timeout_s, phase="weight sync, open the store"
        )
        address, phase = TransportAddress(host, port, self._spec.transport, self._labels()), "weight sync, connect"
        joins = [(address, 1 + rank * size) for rank in range(len(self._rollouts))]
        connect, join = WeightSender.connect_weight_transport, WeightReceiver.open_weight_transport
        await self.call_both(
            phase,
            self._actors.call_one(0, connect, address, timeout_s=timeout_s, phase=phase),
            self._rollouts.call_each(join, joins, timeout_s=timeout_s, phase=phase),
        )
        phase = "weight sync, list the weights"
        metas = await self._actors.call(WeightSender.weights_meta, timeout_s=timeout_s, phase=phase)
        self.meta = metas[0]
        return metas[0]

    def discard(self) -> None:
        """Forget the transport. The next update needs a new one."""
        self.meta = None

    async def call_both(self, phase: str, first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
        """Await two calls of both pools that wait for each other, and return their results.

        If one call fails, the other pool's ranks are interrupted, and its call is awaited until its own deadline. Only
        that deadline identifies a frozen actor rank: to the rollout workers it looks like a sender without data.

        Args:
            phase: Phase of the sync, for errors.
            first: Call of one pool, with a deadline.
            second: Call of the other pool.

        Raises:
            WeightSyncError: A call failed. ``failures`` has all errors. The cause names all workers that did not
                answer, if there are any.
        """
        tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
        interrupted: Collection[object] = ()
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                reasons = "; ".join(str(task.exception()) for task in done if task.exception())
                # Not awaited: it needs 2 s if the process of the store is stopped.
                start_in_thread(interrupt, *self._store, reasons)
                await asyncio.wait(pending)
                interrupted = pending
        finally:
            for task in tasks:
                task.cancel()
        errors = [error for task in tasks if (error := task.exception())]
        if unexpected := [error for error in errors if not isinstance(error, GkdError)]:
            raise unexpected[0]
        # An interrupted call repeats the reason of the interruption, except if it found a worker dead or silent.
        causes = [
            error
            for task in tasks
            if isinstance(error := task.exception(), GkdError)
            and not (task in interrupted and isinstance(error, WeightSyncError))
        ]
        if causes:
            raise as_sync_error(causes, phase) from (merge_deadline_errors(causes) or causes[0])
        return tasks[0].result(), tasks[1].result()

    def _labels(self) -> tuple[str, ...]:
        """Return the names of all transport ranks."""
        size = self._spec.tensor_parallel_size
        receivers = (
            self._rollouts.label(rank) + (f", tensor rank {tensor_rank}" if size > 1 else "")
            for rank in range(len(self._rollouts))
            for tensor_rank in range(size)
        )
        return self._actors.label(0), *receivers
