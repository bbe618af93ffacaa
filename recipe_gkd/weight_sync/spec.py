"""Settings of a weight sync, and what its driver needs of both pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from recipe_gkd.errors import GkdError
from recipe_gkd.runtime.keyed_timeout import with_margin
from recipe_gkd.weight_sync.stats import ReceivedUpdate, TransferStats

if TYPE_CHECKING:
    from recipe_gkd.weight_sync.bucket_plan import TensorMeta

SYNC_RPC_MARGIN_S = 2.5
"""Time by which the driver's deadline is later than the workers', whose errors contain more details."""


@dataclass(frozen=True, kw_only=True)
class WeightSyncSpec:
    """Settings of a weight sync.

    Attributes:
        tensor_parallel_size: Tensor-parallel ranks of each rollout engine.
        bucket_bytes: Maximum size of a bucket.
        timeout_s: Deadline of each phase in the workers.
        transport: Key of ``transport_factory.TRANSPORTS``.
        inflight: If True, rollout workers pause their requests during an update; if False, they finish them before.
        engine_dtype: Name of the torch dtype of the rollout engines; None skips the warning about a conversion.
    """

    tensor_parallel_size: int
    bucket_bytes: int
    timeout_s: float
    transport: str
    inflight: bool = False
    engine_dtype: str | None = None

    @property
    def rpc_timeout_s(self) -> float:
        """Deadline of a remote call, in seconds."""
        return with_margin(self.timeout_s, SYNC_RPC_MARGIN_S)


@dataclass(frozen=True)
class TransportAddress:
    """Address of a transport, with the names of its ranks.

    Attributes:
        host: Address of the store, which actor rank 0 holds.
        port: Port of the store.
        transport: Key of ``transport_factory.TRANSPORTS``.
        labels: Names of all ranks in errors. Rank 0 is the sender.
    """

    host: str
    port: int
    transport: str
    labels: tuple[str, ...]


class Restarts(Protocol):
    """Replacement of rollout workers, as :class:`recipe_gkd.ray_cluster.rollout_restarts.RolloutRestarts` does it."""

    def can_replace(self, error: BaseException) -> bool:
        """Return True if an error is a missed deadline of rollout workers alone, which can be replaced."""

    async def replace_dead(self, death: GkdError | None = None) -> None:
        """Replace all dead workers, and those that the error names because they did not answer."""


class WeightSender(Protocol):
    """Actor rank, as the driver calls it; see :class:`recipe_gkd.actor.ray_worker.ActorWorker`."""

    def open_weight_store(self) -> tuple[str, int]:
        """Open the store of a new transport, and return its host and port. Called on rank 0 only."""

    def connect_weight_transport(self, address: TransportAddress) -> None:
        """Open the transport, and wait until all other ranks have joined. Called on rank 0 only."""

    def weights_meta(self) -> list[TensorMeta]:
        """Return name, shape and dtype of each exported tensor."""

    def send_weights(self, version: int, bucket_bytes: int) -> TransferStats | None:
        """Send the weights as ``version`` in buckets. Return the statistics on rank 0."""


class WeightReceiver(Protocol):
    """Rollout worker, as the driver calls it; see :class:`recipe_gkd.rollout.ray_worker.RolloutWorker`."""

    async def open_weight_transport(self, address: TransportAddress, first_rank: int) -> None:
        """Join a new transport with consecutive ranks, and wait until all other ranks have joined."""

    async def begin_weight_update(self, version: int, meta: Sequence[TensorMeta], inflight: bool = False) -> None:
        """Check the announced weights, hold back new requests, and stop generating."""

    async def receive_weights(self, version: int, meta: Sequence[TensorMeta], bucket_bytes: int) -> ReceivedUpdate:
        """Receive and verify an update."""

    async def commit_weights(self, version: int) -> None:
        """Load the received update, and generate again."""

    async def drop_weights(self) -> str | None:
        """Discard an update. Return the reason why the worker is now invalid; None if it has a complete version."""
