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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe_gkd.errors import GkdError, WeightSyncError, WorkerDied
from recipe_gkd.rollout.update_outcome import UpdateOutcome
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.spec import TransportAddress
from recipe_gkd.weight_sync.stats import ReceivedUpdate

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import LLMEngine


@dataclass(frozen=True)
class Invalidity:
    """Reason why an engine must not generate.

    Attributes:
        reason: Clause about the engine.
        remedy: What makes the engine valid again, as an imperative clause.
        tensors: Names of the weights, if the reason concerns single weights.
    """

    reason: str
    remedy: str
    tensors: tuple[str, ...] = ()

    def error(self, worker: str, effect: str) -> WeightSyncError:
        """Return the error of a worker whose engine is invalid.

        Args:
            worker: Label of the worker.
            effect: Consequence for the caller, as a clause.
        """
        return WeightSyncError(
            f"{effect}: {self.reason}", remedy=self.remedy, worker=worker, tensors=self.tensors, invalid=(worker,)
        )

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class WeightUpdates:
    """State of one engine's weights. It starts invalid.

    Lifecycle::

        updates = WeightUpdates(name)
        updates.join(engine, address, first_rank, timeout_s)  # once, and after every failure
        updates.check_memory(engine, meta, bucket_bytes)      # effective once for each join
        updates.receive(engine, version, meta, bucket_bytes, None)
        updates.commit(engine, version)                       # or updates.drop(engine)

    Args:
        name: Label of the worker, for errors.
        n_sharing_host: Processes that receive the same update into the memory of this host.

    Attributes:
        invalidity: Reason why the engine must not generate; None if it may.
    """

    def __init__(self, name: str, n_sharing_host: int = 1) -> None:
        self.name, self._n_sharing_host = name, n_sharing_host
        self.invalidity: Invalidity | None = Invalidity(
            "it has no weights version yet", "run a complete weight sync first"
        )
        self._permanent_invalidity: Invalidity | None = None
        self._received: int | None = None
        self._memory_is_checked = False

    @property
    def invalid_because(self) -> str | None:
        """Text of :attr:`invalidity`."""
        return None if self.invalidity is None else str(self.invalidity)

    def ensure_valid(self) -> None:
        """Raise :class:`WeightSyncError` if the engine must not generate. ``invalid`` has the name of this worker."""
        if self.invalidity is not None:
            raise self.invalidity.error(self.name, "the engine rejects requests")

    def set_version(self, engine: LLMEngine, version: int) -> None:
        """Declare the current weights of the engine to be ``version``."""
        engine.set_weight_version(str(version))
        self.invalidity = self._permanent_invalidity

    def invalidate(self, invalidity: Invalidity, *, permanently: bool = False) -> None:
        """Reject requests from now on.

        Args:
            invalidity: Reason for errors.
            permanently: If True, an update does not repair the engine.
        """
        self.invalidity = invalidity
        if permanently:
            self._permanent_invalidity = invalidity

    def join(
        self,
        engine: LLMEngine,
        address: TransportAddress,
        first_rank: int,
        timeout_s: float,
    ) -> None:
        """Join a transport with all tensor-parallel ranks.

        Args:
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
        if shortages := [outcome.shortage for outcome in outcomes if outcome.shortage is not None]:
            raise shortages[0].located(worker=self.name)
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
            version: Version of the weights.
            meta: Tensors of the update, in order.
            bucket_bytes: Maximum size of a bucket.
            double_buffered: See :class:`recipe_gkd.rollout.vllm.weights.ReceiveUpdate`.

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
                f"v{version} cannot be committed: the worker has received {self._received}",
                remedy="call receive_weights first",
                worker=self.name,
            )
        self._received = None
        self._call(engine, "gkd_commit_weights")
        self.invalidity = Invalidity("vLLM did not empty the prefix cache of the old weights", "restart this worker")
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
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if any(outcome.has_mixed_weights for outcome in outcomes) and (errors or reason):
            self.invalidity = self.invalidity or Invalidity(
                f"it may have mixed weights ({_reasons(errors) or reason})",
                "only a complete weight sync on a new transport makes it valid again",
            )
        if errors:
            is_unusable = any(outcome.is_unusable for outcome in outcomes)
            raise _joined(errors, is_unusable=is_unusable).located(worker=self.name) from errors[0]
        return outcomes


def _reasons(errors: Sequence[GkdError]) -> str:
    return "; ".join(dict.fromkeys(error.what for error in errors))


def _joined(errors: Sequence[GkdError], *, is_unusable: bool) -> WorkerDied | WeightSyncError:
    """Return one error for the failures of all ranks. Phase, worker and remedy come from the first."""
    first, what = errors[0], _reasons(errors)
    details = tuple(dict.fromkeys(line for error in errors for line in error.details))
    if is_unusable:
        return WorkerDied(what, remedy=first.remedy, phase=first.phase, worker=first.worker, details=details)
    if not isinstance(first, WeightSyncError):
        joined = WeightSyncError(what, remedy=first.remedy, phase=first.phase, worker=first.worker, details=details)
        return joined.replaced(failures=tuple(errors))
    names = (name for error in errors if isinstance(error, WeightSyncError) for name in error.tensors)
    return first.replaced(what=what, details=details, tensors=tuple(dict.fromkeys(names)))
