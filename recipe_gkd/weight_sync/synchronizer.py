"""The driver of a weight sync: lets the actor's rank 0 and every rollout worker act together, in phases.

    connect   a store on the actor's rank 0, and everybody joins        (once, and again after a failure)
    begin     each worker checks the announced weights and falls quiet  (nothing has changed)
    transfer  buckets, then a checksum that all must confirm            (changes nothing on a worker that can stage)
    commit    load what is staged, new version number, empty cache

A failure in any phase ends the attempt: every worker is told to give the update up, and then has its old version, or
is unfit and refuses to generate; only if the commit of some failed do others have the new version already. One more
attempt follows, after ``repair`` and on a new channel, unless a worker was silent until its deadline; if that fails
too, one :class:`WeightSyncError` names who and where, twice. The next :meth:`WeightSynchronizer.sync` connects anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import torch

from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError, find_timeout_error
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.transport import interrupt

log = logging.getLogger(__name__)

_MARGIN_S = 2.5
"""The workers' own deadline ends first: their errors say more than that a worker did not answer."""
_DROP_S = 2.0, 10.0
"""What a worker gets to drop an update, at least and at most: it makes whole the layers that were loaded in part."""
_SILENT_DROP_S = 1.0
"""The same for one that did not answer before: it is told, and hardly waited for."""


class Group(Protocol):
    """What is needed of :class:`recipe_gkd.ray_cluster.worker_group.WorkerGroup`."""

    def __len__(self) -> int: ...

    def label(self, rank: int) -> str: ...

    async def call(self, method: str, *args: Any, timeout_s: float, phase: str) -> list[Any]: ...

    async def call_each(
        self, method: str, args: Sequence[Sequence[Any]], *, timeout_s: float, phase: str
    ) -> list[Any]: ...

    async def call_one(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> Any: ...


class WeightSynchronizer:
    """Weights from ``actors`` to ``rollouts``, each of whose engines has ``tensor_parallel_size`` workers.

    The actors need the methods ``open_weight_store``, ``connect_weight_channel``, ``weights_meta`` and ``send_weights``
    (see :class:`WeightSenderApi`), the rollouts those of :class:`RolloutWorker`. ``timeout_s`` bounds each phase.
    ``transport``: see ``connect.TRANSPORTS``. ``inflight``: workers need not finish their answers before an update.
    ``engine_dtype``: what the workers load into, the name of a torch dtype. ``repair`` may replace dead workers in
    ``rollouts``; it is awaited before the second attempt.
    """

    def __init__(
        self,
        actors: Group,
        rollouts: Group,
        *,
        tensor_parallel_size: int,
        bucket_bytes: int,
        timeout_s: float,
        transport: str,
        inflight: bool = False,
        engine_dtype: str | None = None,
        repair: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._actors, self._rollouts = actors, rollouts
        self._tensor_parallel_size, self._bucket_bytes, self._timeout_s = tensor_parallel_size, bucket_bytes, timeout_s
        self._transport, self._inflight, self._engine_dtype, self._repair = transport, inflight, engine_dtype, repair
        self._meta: list[TensorMeta] | None = None
        """None: not connected."""
        self._store: tuple[str, int] = ("", 0)
        """Host and port of the store where all meet."""
        self._conversion_told = False

    def forget(self) -> None:
        """Let the next sync connect anew: a worker was replaced."""
        self._meta = None

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
        self._store = host, port
        joins = [(host, port, 1 + rank * size, labels, self._transport) for rank in range(len(self._rollouts))]
        phase = "weight sync, connect"
        await self._together(
            phase,
            self._actors.call_one(
                0, "connect_weight_channel", labels, self._transport, timeout_s=self._wait_s, phase=phase
            ),
            self._rollouts.call_each("open_weight_channel", joins, timeout_s=self._wait_s, phase=phase),
        )
        metas = await self._actors.call("weights_meta", timeout_s=self._wait_s, phase="weight sync, list the weights")
        self._tell_conversion(metas[0])
        self._meta = metas[0]

    async def sync(self, version: int) -> dict[str, float]:
        """Bring every rollout worker to the actor's present weights, as ``version``; what it cost."""
        log.info("weight sync v%d: begins, %d rollout workers", version, len(self._rollouts))
        started = time.monotonic()
        try:
            numbers = await self._attempt(version)
            retries = 0
        except WeightSyncError as first:
            if isinstance(first.__cause__, DeadlineError) or find_timeout_error(first):
                raise  # a new channel does not make a silent worker answer, and the time is over
            log.warning("weight sync v%d: is tried once more, on a new channel", version)
            try:
                if self._repair is not None:
                    await self._repair()
                numbers = await self._attempt(version)
            except GkdError as second:
                raise WeightSyncError(f"{second}; the first attempt, before it: {first}") from second
            retries = 1
        seconds = time.monotonic() - started
        megabytes = numbers["weights/megabytes"]
        log.info(
            "weight sync v%d: %.1f MB in %.2f s (%.0f MB/s), %d rollout workers",
            version, megabytes, seconds, megabytes / seconds, len(self._rollouts),
        )  # fmt: skip
        return numbers | {"timing/sync_rollout_weights": seconds, "weights/retries": float(retries)}

    async def _attempt(self, version: int) -> dict[str, float]:
        """One go through all phases. When it raises, every worker that lives was told to give the update up."""
        name = f"weight sync v{version}"
        started, phase = time.monotonic(), "weight sync, connect"
        try:
            if self._meta is None:
                await self.connect()
            meta, phase = self._meta, f"{name}, begin"
            await self._on_rollouts("begin_weight_update", version, meta, self._inflight, phase=phase)
            quiet, phase = time.monotonic(), f"{name}, transfer"
            sent, received = await self._together(
                phase,
                self._actors.call(
                    "send_weights", version, self._bucket_bytes, timeout_s=self._wait_s, phase=f"{name}, send"
                ),
                self._on_rollouts("receive_weights", version, meta, self._bucket_bytes, phase=f"{name}, receive"),
            )
            transferred, phase = time.monotonic(), f"{name}, commit"
            await self._on_rollouts("commit_weights", version, phase=phase)
        except GkdError as error:
            self._meta = None
            aftermath, cause = await self._give_up(error, phase, started)
            log.error("%s: failed: %s; %s", name, error, aftermath)
            raise WeightSyncError(f"{error}; {aftermath}") from cause
        stats = sent[0]
        return {
            "timing/sync_rollout_weights_begin": quiet - started,
            "timing/sync_rollout_weights_transfer": transferred - quiet,
            "timing/sync_rollout_weights_commit": time.monotonic() - transferred,
            "weights/version": float(version),
            "weights/megabytes": stats.megabytes,
            "weights/mb_per_s": stats.mb_per_s,
            "weights/staged_workers": float(sum(outcome["staged"] for outcome in received)),
        }

    def _tell_conversion(self, meta: Sequence[TensorMeta]) -> None:
        """Weights travel bit by bit; what the engine makes of another dtype is said once."""
        sent = {dtype for _, _, dtype in meta if getattr(torch, dtype).is_floating_point}
        if self._engine_dtype is None or self._conversion_told or not (other := sent - {self._engine_dtype}):
            return
        self._conversion_told = True
        log.warning(
            "the actor sends weights in %s, which the rollout engine converts to %s as it loads them "
            "(actor_rollout_ref.rollout.dtype)",
            ", ".join(sorted(other)), self._engine_dtype,
        )  # fmt: skip

    @property
    def _wait_s(self) -> float:
        return self._timeout_s + _MARGIN_S

    async def _on_rollouts(self, method: str, *args: Any, phase: str) -> list[Any]:
        return await self._rollouts.call(method, *args, timeout_s=self._wait_s, phase=phase)

    async def _together(self, phase: str, *calls: Awaitable[Any]) -> list[Any]:
        """Both sides of the channel. When one fails, the other is told and awaited; all errors are raised as one.

        Each of ``calls`` has a deadline. To be awaited until then is what names those that do not answer: of a frozen
        actor rank the rollout workers know no more than that nothing comes.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                reasons = "; ".join(str(task.exception()) for task in done if task.exception())
                await in_thread(interrupt, *self._store, reasons)
                await asyncio.wait(pending)
        finally:
            for task in tasks:
                task.cancel()
        errors = list(dict.fromkeys(error for task in tasks if (error := task.exception())))
        if unexpected := [error for error in errors if not isinstance(error, GkdError)]:
            raise unexpected[0]
        if errors:
            told = " | ".join(dict.fromkeys(str(error) for error in errors))
            raise WeightSyncError(f"{phase}: {told}") from (_joint_silence(errors) or errors[0])
        return [task.result() for task in tasks]

    async def _give_up(self, error: GkdError, phase: str, started: float) -> tuple[str, GkdError]:
        """Have every rollout worker drop the update, after ``error``: what came of it, and the cause of it all.

        The cause is ``error``, or, if workers do not answer now, an error that names all that were silent in ``phase``.
        """
        known, (least, most) = find_timeout_error(error), _DROP_S
        drop_s = min(max(least, self._timeout_s / 2), most)
        labels = [self._rollouts.label(rank) for rank in range(len(self._rollouts))]
        states = await asyncio.gather(
            *(
                self._rollouts.call_one(
                    rank,
                    "drop_weights",
                    timeout_s=_SILENT_DROP_S if known and label in known.silent else drop_s,
                    phase="weight sync, give up",
                )
                for rank, label in enumerate(labels)
            ),
            return_exceptions=True,
        )
        gone = [state for state in states if isinstance(state, GkdError)]
        unfit = [label for label, state in zip(labels, states, strict=True) if isinstance(state, str)]
        if unexpected := [state for state in states if isinstance(state, BaseException) and state not in gone]:
            raise unexpected[0]
        mixed = f"unfit until a full sync succeeds: {', '.join(unfit)}" if unfit else "no other worker holds a mixture"
        aftermath = "; ".join([mixed, *map(str, gone)])
        late = _joint_silence([known, *gone] if known else gone)
        if late is None or (known and set(late.silent) == set(known.silent)):
            return aftermath, error
        late.phase, late.waited_s = known.phase if known else phase, round(time.monotonic() - started, 1)
        answered = [label for label, state in zip(labels, states, strict=True) if not isinstance(state, BaseException)]
        late.answered = [label for label in dict.fromkeys([*late.answered, *answered]) if label not in late.silent]
        late.__cause__ = error
        return aftermath, late


def _joint_silence(errors: Sequence[BaseException]) -> DeadlineError | None:
    """One error for all workers that these say did not answer the driver; None if they say so of nobody."""
    late = [error for error in errors if isinstance(error, DeadlineError) and error.silent]
    if not late:
        return None
    joint = DeadlineError("; ".join(map(str, late)))
    joint.phase, joint.waited_s = late[0].phase, late[0].waited_s
    joint.silent = list(dict.fromkeys(label for error in late for label in error.silent))
    joint.answered = [label for error in late for label in error.answered if label not in joint.silent]
    joint.__cause__ = late[0]
    return joint
