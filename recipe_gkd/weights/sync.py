"""The driver of a weight sync: lets the actor's rank 0 and every rollout worker act together, in phases.

    connect   a store on the actor's rank 0, and everybody joins        (once, and again after a failure)
    begin     each worker checks the announced weights and falls quiet  (nothing has changed)
    transfer  buckets, then a checksum that all must confirm            (changes nothing on a worker that can stage)
    commit    load what is staged, new version number, empty cache

A failure in any phase raises one :class:`WeightSyncError` that names who and where, after every worker was told to give
the update up: it then has its old version, or is unfit and refuses to generate. The next :meth:`WeightSync.sync`
connects anew and repairs it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weights.buckets import TensorMeta
from recipe_gkd.weights.channel import interrupt

log = logging.getLogger(__name__)

_MARGIN_S = 5.0
"""The workers' own deadline ends first: their errors say more than that a worker did not answer."""


class Group(Protocol):
    """What is needed of :class:`recipe_gkd.groups.WorkerGroup`."""

    def __len__(self) -> int: ...

    def label(self, rank: int) -> str: ...

    async def call(self, method: str, *args: Any, timeout_s: float, phase: str) -> list[Any]: ...

    async def call_each(
        self, method: str, args: Sequence[Sequence[Any]], *, timeout_s: float, phase: str
    ) -> list[Any]: ...

    async def call_one(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> Any: ...


class WeightSync:
    """Weights from ``actors`` to ``rollouts``, each of whose engines has ``tensor_parallel_size`` workers.

    The actors need the methods ``open_weight_store``, ``connect_weight_channel``, ``weights_meta`` and ``send_weights``
    (see :class:`ActorWeights`), the rollouts those of :class:`RolloutWorker`. ``timeout_s`` bounds each phase.
    """

    def __init__(
        self, actors: Group, rollouts: Group, *, tensor_parallel_size: int, bucket_bytes: int, timeout_s: float
    ) -> None:
        self._actors, self._rollouts = actors, rollouts
        self._tensor_parallel_size, self._bucket_bytes, self._timeout_s = tensor_parallel_size, bucket_bytes, timeout_s
        self._meta: list[TensorMeta] | None = None
        """None: not connected."""
        self._store: tuple[str, int, int] = ("", 0, 0)
        """Host, port, and the number of ranks that meet there."""

    async def connect(self) -> None:
        """Build the channel, and learn what will be sent over it."""
        self._meta = None
        host, port = await self._actors.call_one(
            0, "open_weight_store", timeout_s=self._wait_s, phase="weight sync, open the store"
        )
        size = self._tensor_parallel_size
        labels = [self._actors.label(0)] + [
            self._rollouts.label(rank) + (f", tensor rank {part}" if size > 1 else "")
            for rank in range(len(self._rollouts))
            for part in range(size)
        ]
        self._store = host, port, len(labels)
        joins = [(host, port, 1 + rank * size, labels) for rank in range(len(self._rollouts))]
        phase = "weight sync, connect"
        await self._together(
            phase,
            self._actors.call_one(0, "connect_weight_channel", labels, timeout_s=self._wait_s, phase=phase),
            self._rollouts.call_each("open_weight_channel", joins, timeout_s=self._wait_s, phase=phase),
        )
        metas = await self._actors.call("weights_meta", timeout_s=self._wait_s, phase="weight sync, list the weights")
        self._meta = metas[0]

    async def sync(self, version: int) -> dict[str, float]:
        """Bring every rollout worker to the actor's present weights, as ``version``; what it cost."""
        log.info("weight sync v%d: begins, %d rollout workers", version, len(self._rollouts))
        started = time.monotonic()
        try:
            if self._meta is None:
                await self.connect()
            assert self._meta is not None
            name = f"weight sync v{version}"
            await self._on_rollouts("begin_weight_update", version, self._meta, phase=f"{name}, begin")
            quiet = time.monotonic()
            sent, received = await self._together(
                f"{name}, transfer",
                self._actors.call(
                    "send_weights", version, self._bucket_bytes, timeout_s=self._wait_s, phase=f"{name}, send"
                ),
                self._on_rollouts("receive_weights", version, self._meta, self._bucket_bytes, phase=f"{name}, receive"),
            )
            transferred = time.monotonic()
            await self._on_rollouts("commit_weights", version, phase=f"{name}, commit")
        except GkdError as error:
            self._meta = None
            aftermath = await self._give_up()
            log.error("weight sync v%d: failed: %s; %s", version, error, aftermath)
            raise WeightSyncError(f"{error}; {aftermath}") from error
        done = time.monotonic()
        stats = sent[0]
        log.info(
            "weight sync v%d: %.1f MB in %.2f s (%.0f MB/s), %d rollout workers",
            version, stats.megabytes, done - started, stats.megabytes / (done - started), len(self._rollouts),
        )  # fmt: skip
        return {
            "timing/sync_rollout_weights": done - started,
            "timing/sync_rollout_weights_begin": quiet - started,
            "timing/sync_rollout_weights_transfer": transferred - quiet,
            "timing/sync_rollout_weights_commit": done - transferred,
            "weights/version": float(version),
            "weights/megabytes": stats.megabytes,
            "weights/mb_per_s": stats.mb_per_s,
            "weights/staged_workers": float(sum(outcome["staged"] for outcome in received)),
        }

    @property
    def _wait_s(self) -> float:
        return self._timeout_s + _MARGIN_S

    async def _on_rollouts(self, method: str, *args: Any, phase: str) -> list[Any]:
        return await self._rollouts.call(method, *args, timeout_s=self._wait_s, phase=phase)

    async def _together(self, phase: str, *calls: Awaitable[Any]) -> list[Any]:
        """Both sides of the channel. When one fails, the other is told and awaited; all errors are raised as one."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                reasons = "; ".join(str(task.exception()) for task in done if task.exception())
                await asyncio.to_thread(interrupt, *self._store, reasons)
                await asyncio.wait(pending)
        finally:
            for task in tasks:
                task.cancel()
        errors = dict.fromkeys(error for task in tasks if (error := task.exception()))
        if unexpected := [error for error in errors if not isinstance(error, GkdError)]:
            raise unexpected[0]
        if errors:
            told = " | ".join(dict.fromkeys(str(error) for error in errors))
            raise WeightSyncError(f"{phase}: {told}") from next(iter(errors))
        return [task.result() for task in tasks]

    async def _give_up(self) -> str:
        """Have every rollout worker drop the update. A worker still in its transfer answers after its deadline."""
        phase = "weight sync, give up"
        states = await asyncio.gather(
            *(
                self._rollouts.call_one(rank, "drop_weights", timeout_s=self._wait_s, phase=phase)
                for rank in range(len(self._rollouts))
            ),
            return_exceptions=True,
        )
        gone = [str(state) for state in states if isinstance(state, GkdError)]
        unfit = [self._rollouts.label(rank) for rank, state in enumerate(states) if isinstance(state, str)]
        if unexpected := [state for state in states if isinstance(state, BaseException) and str(state) not in gone]:
            raise unexpected[0]
        return "; ".join(
            [
                f"unfit until a full sync succeeds: {', '.join(unfit)}" if unfit else "no other worker holds a mixture",
                *gone,
            ]
        )
