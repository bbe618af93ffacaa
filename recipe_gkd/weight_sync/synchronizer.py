"""Driver of the weight sync.

========= ==================================================== ========================================================
Phase     Action                                               State of the rollout workers after a failure
========= ==================================================== ========================================================
connect   store on actor rank 0, rendezvous of all ranks,      previous version
          communicator
begin     each worker checks the announced weights and, after  previous version
          a new connection, its memory, and stops generating
transfer  buckets, then a checksum that all ranks confirm      previous version if double-buffered; invalid if in place
commit    load, new version number, empty prefix cache         previous version, invalid, or new version
========= ==================================================== ========================================================

``connect`` runs once, and again after a failure or after :meth:`WeightSynchronizer.forget`. After a failure in any
phase, every worker drops the update.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from recipe_gkd.errors import DeadlineError, GkdError, ResourceError, WeightSyncError, find_timeout_error
from recipe_gkd.runtime.remote_group import RemoteGroup
from recipe_gkd.runtime.run_log import FILE_ONLY
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.cleanup import drop_update
from recipe_gkd.weight_sync.connection import WeightConnection
from recipe_gkd.weight_sync.failures import as_sync_error
from recipe_gkd.weight_sync.spec import Restarts, WeightReceiver, WeightSender, WeightSyncSpec

log = logging.getLogger(__name__)


class WeightSynchronizer:
    """Transfers the actor's weights to all rollout workers as one version.

    Lifecycle::

        sync = WeightSynchronizer(actors, rollouts, spec)
        await sync.connect()                # optional: sync() connects if needed
        metrics = await sync.sync(version)  # begin, transfer, commit; retried once on a new transport
        sync.forget()                       # after a worker was replaced: the next sync connects again

    A rollout worker never generates with a partial update: it keeps the previous version, or rejects requests until a
    complete sync.

    Args:
        actors: Actor pool.
        rollouts: Rollout pool.
        spec: Settings.
        restarts: Replacement of workers in ``rollouts`` before the second attempt. None: none is replaced.
    """

    def __init__(
        self,
        actors: RemoteGroup[WeightSender],
        rollouts: RemoteGroup[WeightReceiver],
        spec: WeightSyncSpec,
        *,
        restarts: Restarts | None = None,
    ) -> None:
        self._actors, self._rollouts, self._spec, self._restarts = actors, rollouts, spec, restarts
        self._connection = WeightConnection(actors, rollouts, spec)
        self._warned_of_conversion = self._has_synced = False

    def forget(self) -> None:
        """Discard the transport, because a worker was replaced. The next sync connects again."""
        self._connection.discard()

    async def connect(self) -> None:
        """Connect all ranks over a new transport.

        Raises:
            WeightSyncError: A rank failed, or its worker died.
            DeadlineError: A worker did not answer.
        """
        self._connection.discard()
        self._warn_of_conversion(await self._connection.open())

    async def sync(self, version: int) -> dict[str, float]:
        """Transfer the actor's current weights to all rollout workers.

        A failed attempt is repeated once on a new transport, after dead rollout workers and those that did not answer
        were replaced. It is not repeated if the update does not fit into the memory of a worker, or if a worker that
        cannot be replaced did not answer, because a new transport would wait for the same worker again.

        Args:
            version: Version that the rollout workers report for the new weights.

        Returns:
            Metrics ``weights/*`` and ``timing/sync_rollout_weights*``.

        Raises:
            WeightSyncError: Both attempts failed, or one without a retry. Its cause is a :class:`DeadlineError` if a
                worker did not answer.
        """
        log.info("weight sync v%d: begins, %d rollout workers", version, len(self._rollouts), extra=FILE_ONLY)
        started = time.monotonic()
        try:
            metrics = await self._attempt(version)
            retries = 0
        except WeightSyncError as first:
            is_late = isinstance(first.__cause__, DeadlineError) or find_timeout_error(first) is not None
            can_replace = self._restarts is not None and self._restarts.can_replace(first)
            if isinstance(first.__cause__, ResourceError) or (is_late and not can_replace):
                raise
            log.warning("weight sync v%d: retrying once on a new transport", version)
            try:
                if self._restarts is not None:
                    await self._restarts.replace_dead(first)
                metrics = await self._attempt(version)
            except GkdError as second:
                failed = second if isinstance(second, WeightSyncError) else as_sync_error([second], "weight sync")
                note = f"the first attempt failed with: {first.replaced(remedy='', details=())}"
                raise failed.replaced(first_attempt=first, details=(*failed.details, note)) from second
            retries = 1
        seconds = time.monotonic() - started
        megabytes = metrics["weights/megabytes"]
        # The line of each step has the time of its sync, so the console shows the first one, and what went wrong.
        is_news = retries > 0 or not self._has_synced
        log.info(
            "weight sync v%d: %.1f MB in %.2f s (%.0f MB/s), %d rollout workers",
            version, megabytes, seconds, megabytes / seconds, len(self._rollouts), extra=None if is_news else FILE_ONLY,
        )  # fmt: skip
        self._has_synced = True
        return metrics | {"timing/sync_rollout_weights": seconds, "weights/retries": float(retries)}

    async def _attempt(self, version: int) -> dict[str, float]:
        """Run all phases once. After a failure every worker that is alive has dropped the update."""
        name, spec = f"weight sync v{version}", self._spec
        size, timeout_s = spec.bucket_bytes, spec.rpc_timeout_s
        started, phase = time.monotonic(), "weight sync, connect"
        try:
            if self._connection.meta is None:
                await self.connect()
            meta, phase = self._connection.meta or [], f"{name}, begin"
            await self._rollouts.call(
                WeightReceiver.begin_weight_update, version, meta, spec.inflight, timeout_s=timeout_s, phase=phase
            )
            begun, phase = time.monotonic(), f"{name}, transfer"
            sent, received = await self._connection.call_both(
                phase,
                self._actors.call(WeightSender.send_weights, version, size, timeout_s=timeout_s, phase=f"{name}, send"),
                self._rollouts.call(
                    WeightReceiver.receive_weights, version, meta, size, timeout_s=timeout_s, phase=f"{name}, receive"
                ),
            )
            transferred, phase = time.monotonic(), f"{name}, commit"
            await self._rollouts.call(WeightReceiver.commit_weights, version, timeout_s=timeout_s, phase=phase)
        except GkdError as error:
            self._connection.discard()
            dropped = await drop_update(self._rollouts, error, phase=phase, started=started, timeout_s=spec.timeout_s)
            log.error("%s: failed: %s; %s", name, error, dropped)
            failed = error if isinstance(error, WeightSyncError) else as_sync_error([error], phase)
            details = (*failed.details, str(dropped))
            raise failed.replaced(invalid=dropped.invalid, details=details) from dropped.cause
        [stats] = filter(None, sent)  # of actor rank 0
        return {
            "timing/sync_rollout_weights_begin": begun - started,
            "timing/sync_rollout_weights_transfer": transferred - begun,
            "timing/sync_rollout_weights_commit": time.monotonic() - transferred,
            "weights/version": float(version),
            "weights/megabytes": stats.megabytes,
            "weights/mb_per_s": stats.mb_per_s,
            "weights/double_buffered_workers": float(sum(update.double_buffered for update in received)),
        }

    def _warn_of_conversion(self, meta: Sequence[TensorMeta]) -> None:
        """Warn once if the engines convert the weights, which are transferred in the actor's dtype."""
        engine_dtype = self._spec.engine_dtype
        sent = {dtype for _, _, dtype in meta if getattr(torch, dtype).is_floating_point}
        if engine_dtype is None or self._warned_of_conversion or not (other := sent - {engine_dtype}):
            return
        self._warned_of_conversion = True
        log.warning(
            "the actor sends weights in %s, which the rollout engine converts to %s as it loads them "
            "(actor_rollout_ref.rollout.dtype)",
            ", ".join(sorted(other)), engine_dtype,
        )  # fmt: skip
