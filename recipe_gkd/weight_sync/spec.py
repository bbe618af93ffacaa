"""Settings of a weight sync, and the interface of the two worker groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recipe_gkd.errors import GkdError
from recipe_gkd.runtime.keyed_timeout import with_margin

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


class Restarts(Protocol):
    """Replacement of rollout workers, as :class:`recipe_gkd.ray_cluster.rollout_restarts.RolloutRestarts` does it."""

    def can_replace(self, error: BaseException) -> bool:
        """Return True if an error is a missed deadline of rollout workers alone, which can be replaced."""

    async def replace_dead(self, death: GkdError | None = None) -> None:
        """Replace all dead workers, and those that the error names because they did not answer."""


class RemoteGroup(Protocol):
    """Workers of one pool; :class:`recipe_gkd.ray_cluster.worker_group.WorkerGroup` implements it."""

    def __len__(self) -> int:
        """Return the number of workers."""

    def label(self, rank: int) -> str:
        """Return the name of a worker in error messages."""

    async def call(self, method: str, *args: Any, timeout_s: float, phase: str) -> list[Any]:
        """Call all workers with equal arguments; return the results by rank."""

    async def call_each(self, method: str, args: Sequence[Sequence[Any]], *, timeout_s: float, phase: str) -> list[Any]:
        """Call each worker with its own arguments; return the results by rank."""

    async def call_one(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> Any:
        """Call one worker; return its result."""
