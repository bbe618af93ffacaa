"""State of an engine's weights, and the steps of an update.

========= ======================================== ==================================================================
State     Entered by                               Left by
========= ======================================== ==================================================================
invalid   construction; a failed update after      ``set_version``, or ``commit`` of a complete update
          which the weights may be mixed; a sleep    (not if it is invalid permanently)
          that releases or changes the weights
valid     ``set_version``, ``commit``              ``receive`` of an update that is then dropped or fails, if it was
                                                   loaded in place
received  ``receive``; the old version is still    ``commit`` (valid, new version) or ``drop`` (valid with the old
          used                                     version, or invalid)
========= ======================================== ==================================================================

Methods with an ``engine`` parameter run on the engine's thread (``RolloutEngine.run``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipe_gkd.errors import ResourceError, WeightSyncError, WorkerDied
from recipe_gkd.rollout.update_outcome import UpdateOutcome
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.spec import TransportAddress
from recipe_gkd.weight_sync.stats import ReceivedUpdate

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm_compat import LLMEngine


class WeightUpdates:
    """State of one engine's weights. It starts invalid.

    Lifecycle::

        updates = WeightUpdates(name)
        updates.join(engine, address, first_rank, timeout_s)  # once, and after every failure
        updates.check_memory(engine, meta, bucket_bytes)      # effective once for each join
        updates.receive(engine, version, meta, bucket_bytes, None)
        updates.commit(engine, version)                       # or updates.drop(engine)

    Args:
        name: Name of the worker in error messages.
        n_sharing_host: Processes that receive the same update into the memory of this host.

    Attributes:
        invalid_because: Reason why the engine must not generate; None if it may.
    """

    def __init__(self, name: str, n_sharing_host: int = 1) -> None:
        self.name, self._n_sharing_host = name, n_sharing_host
        self.invalid_because: str | None = "it has no weights version yet; run a complete weight sync first"
        self._permanently_invalid_because: str | None = None
        self._received: int | None = None
        self._memory_is_checked = False

    def ensure_valid(self) -> None:
        """Raise :class:`WeightSyncError` if the engine must not generate."""
        if self.invalid_because is not None:
            raise WeightSyncError(f"{self.name} rejects requests: {self.invalid_because}")

    def set_version(self, engine: LLMEngine, version: int) -> None:
        """Declare the current weights of the engine to be ``version``."""
        engine.set_weight_version(str(version))
        self.invalid_because = self._permanently_invalid_because

    def invalidate(self, reason: str, *, permanently: bool = False) -> None:
        """Reject requests from now on.

        Args:
            reason: Reason for error messages, with a remedy.
            permanently: If True, an update does not repair the engine.
        """
        self.invalid_because = reason
        if permanently:
            self._permanently_invalid_because = reason

    def join(
        self,
        engine: LLMEngine,
        address: TransportAddress,
        first_rank: int,
        timeout_s: float,
    ) -> None:
        """Join a transport with all tensor-parallel ranks.

        Args:
            engine: The engine.
            address: The transport.
            first_rank: Transport rank of the first tensor-parallel rank.
            timeout_s: Deadline of each update.

        Raises:
            WeightSyncError: A rank could not join.
            WorkerDied: A rank has lost its CUDA device, or could not reload a layer.
        """
        info = {"address": address, "first_rank": first_rank, "timeout_s": timeout_s}
        self._memory_is_checked = False
        self._call(engine, "gkd_join_transport", info)

    def check_memory(self, engine: LLMEngine, meta: Sequence[TensorMeta], bucket_bytes: int) -> None:
        """Check that an update fits into the free memory of all ranks. Has an effect once for each transport.

        Args:
            engine: The engine.
            meta: Tensors of the update, in order.
            bucket_bytes: Maximum size of a bucket.

        Raises:
            ResourceError: It does not fit.
            WeightSyncError: There is no transport.
            WorkerDied: A rank has lost its CUDA device, or could not reload a layer.
        """
        if self._memory_is_checked:
            return
        info = {"meta": list(meta), "bucket_bytes": bucket_bytes, "n_sharing_host": self._n_sharing_host}
        outcomes = self._call(engine, "gkd_check_memory", info)
        if shortages := [outcome.shortage for outcome in outcomes if outcome.shortage]:
            raise ResourceError(f"{self.name}: {shortages[0]}")
        self._memory_is_checked = True

    def receive(
        self,
        engine: LLMEngine,
        version: int,
        meta: Sequence[TensorMeta],
        bucket_bytes: int,
        double_buffered: bool | None,
    ) -> ReceivedUpdate:
        """Receive an update and verify its checksum.

        Args:
            engine: The engine.
            version: Version of the weights.
            meta: Tensors of the update, in order.
            bucket_bytes: Maximum size of a bucket.
            double_buffered: See :class:`recipe_gkd.rollout.vllm_weights.ReceiveUpdate`.

        Returns:
            Statistics of the slowest tensor-parallel rank.

        Raises:
            WeightSyncError: The transfer failed.
            WorkerDied: A rank has lost its CUDA device, or could not reload a layer.
        """
        self._received = None
        info = {
            "version": version,
            "meta": list(meta),
            "bucket_bytes": bucket_bytes,
            "double_buffered": double_buffered,
            "n_sharing_host": self._n_sharing_host,
        }
        outcomes = self._call(engine, "gkd_receive_weights", info)
        self._received = version
        received = (outcome.received for outcome in outcomes if outcome.received is not None)
        return max(received, key=lambda update: update.seconds)

    def commit(self, engine: LLMEngine, version: int) -> None:
        """Load the received update. Requests in flight continue with the new weights at their next token.

        Raises:
            WeightSyncError: ``version`` was not received, a weight is missing, vLLM kept its prefix cache, or the
                engine is invalid permanently.
            WorkerDied: A rank has lost its CUDA device, or could not reload a layer.
        """
        if self._received != version:
            self.drop(engine)
            raise WeightSyncError(
                f"{self.name} cannot commit v{version}: it has received {self._received}; call receive_weights first"
            )
        self._received = None
        self._call(engine, "gkd_commit_weights")
        self.invalid_because = "vLLM did not empty the prefix cache of the old weights; restart this worker"
        if not engine.reset_prefix_cache(reset_running_requests=True):  # running requests compute their cache again
            self.ensure_valid()
        self.set_version(engine, version)
        self.ensure_valid()

    def drop(self, engine: LLMEngine) -> None:
        """Discard an update in any state, and leave the transport.

        Raises:
            WeightSyncError: A rank failed.
            WorkerDied: A rank has lost its CUDA device, or could not reload a layer.
        """
        self._received = None
        self._call(engine, "gkd_drop_weights", reason="an update was dropped")
        self._call(engine, "gkd_close_transport")

    def _call(
        self, engine: LLMEngine, method: str, *args: dict[str, object], reason: str | None = None
    ) -> list[UpdateOutcome]:
        outcomes: list[UpdateOutcome] = engine.collective_rpc(method, args=args)
        errors = dict.fromkeys(outcome.error for outcome in outcomes if outcome.error)
        if any(outcome.has_mixed_weights for outcome in outcomes) and (errors or reason):
            self.invalid_because = self.invalid_because or (
                f"it may have mixed weights ({'; '.join(errors) or reason}); only a complete weight sync on a new "
                "transport makes it valid again"
            )
        if errors:
            is_unusable = any(outcome.is_unusable for outcome in outcomes)
            raise (WorkerDied if is_unusable else WeightSyncError)(f"{self.name}: {'; '.join(errors)}")
        return outcomes
