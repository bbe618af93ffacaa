"""Base class of the transports, which move buckets from the actor's rank 0 to the rollout workers.

========== ==================================== =========================================================
State      Entered by                           Left by
========== ==================================== =========================================================
connecting constructor, on all ranks together   ``open``, or ``closed`` if a rank is missing or fails
open       all ranks have connected             ``closed``; any number of updates before
closed     ``close``, or the failure of a rank  never: a late transfer could arrive as one of the next
                                                update, so a new transport needs a new store
========== ==================================== =========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from recipe_gkd.errors import GkdError
from recipe_gkd.weight_sync.bucket_plan import BucketPlan, TensorMeta
from recipe_gkd.weight_sync.host_memory import BufferPool, allocate_host_buffer
from recipe_gkd.weight_sync.mailbox import Topic
from recipe_gkd.weight_sync.peers import PeerGroup


class Transport:
    """One rank of a transport. Rank 0 sends, all other ranks receive.

    Lifecycle::

        store = open_store(host, timeout_s)           # rank 0; other ranks: join_store(host, port, timeout_s)
        transport = open_transport(name, store, ...)  # all ranks at the same time
        send_weights(transport, ...)                  # any number of updates; other ranks: receive_weights
        transport.close()

    After a failure a transport is closed. Only one thread may use it at a time.

    While rank 0's process is stopped, other ranks wait without a deadline, because torch's store client has none. They
    continue when that process continues or ends. The driver of all ranks has a deadline and kills it.

    Args:
        store: Rank 0's store, or a client of it.
        labels: Names of all ranks in error messages.
        device: Device of the buckets.
        timeout_s: Time for all waits of one update together, and for the constructor.

    Attributes:
        peers: Messages and deadline of this rank.
        sends_in_place: True if :meth:`broadcast` accepts any memory of the device, False if rank 0 must send from
            :meth:`packing_buffers` or :meth:`allocate`.

    Raises:
        DeadlineError: A rank did not connect in time; rank 0's message names it.
        WeightSyncError: A rank reported a failure.
    """

    sends_in_place = False

    def __init__(
        self, store: dist.TCPStore, *, rank: int, labels: Sequence[str], device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.device = rank, device
        self.peers = PeerGroup(store, rank=rank, labels=labels, timeout_s=timeout_s, hooks=self)
        self._plan: BucketPlan | None = None
        self._packing_buffers: list[torch.Tensor] = []
        self._pool = BufferPool(device)
        self.peers.rendezvous("connect")
        try:
            self._open()
        except GkdError as error:
            self.peers.abandon(str(error))
            raise
        except (RuntimeError, OSError) as error:
            self.peers.fail("connect", error)

    def close(self) -> None:
        """Close this rank. Ranks that wait for it in a broadcast fail at their deadline at the latest. Idempotent."""
        self.peers.close("on request")

    # Implemented by each transport.

    def _open(self) -> None:
        """Build the connection for buckets. All ranks call it at the same time."""

    def _close(self) -> None:
        """Release the connection, even during a broadcast."""

    def bucket_topics(self) -> list[Topic]:
        """Return the topics of buckets for which other ranks may wait."""
        return []

    def broadcast(self, buffer_U: torch.Tensor) -> Any:
        """Start to send a bucket (rank 0) or to receive one. At most two may be in flight.

        Args:
            buffer_U: Bucket, uint8 [U]. It must not be used before :meth:`finish`.

        Returns:
            Handle for :meth:`finish`.
        """
        raise NotImplementedError

    def finish(self, work: Any, phase: str) -> None:
        """Wait for a bucket.

        Args:
            work: Result of :meth:`broadcast`.
            phase: Phase of the update, for error messages.

        Raises:
            DeadlineError: A rank did not answer before the deadline.
            WeightSyncError: The connection broke, or a rank reported a failure.
        """
        raise NotImplementedError

    # Buffers.

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """Return memory that rank 0 can send from, uint8 [n_bytes]."""
        if self.device.type == "cuda":
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        return allocate_host_buffer(n_bytes)

    def packing_buffers(self, n: int, n_bytes: int) -> list[torch.Tensor]:
        """Return ``n`` buffers to pack into, on rank 0, each uint8 [n_bytes].

        Buffers in host memory are kept for later updates, because new host memory is slow.
        """
        kept = [buffer_U for buffer_U in self._packing_buffers if buffer_U.numel() >= n_bytes][:n]
        buffers = kept + [self.allocate(n_bytes) for _ in range(n - len(kept))]
        self._packing_buffers = [buffer_U for buffer_U in buffers if buffer_U.device.type == "cpu"]
        return [buffer_U[:n_bytes] for buffer_U in buffers]

    def receive_buffer(self, n_bytes: int) -> torch.Tensor:
        """Return a buffer to receive into, uint8 [n_bytes]. It is reused after its last tensor is gone."""
        return self._pool.lend(n_bytes)

    def plan(self, meta: Sequence[TensorMeta], bucket_bytes: int) -> BucketPlan:
        """Return the buckets of an update; the last plan is kept.

        Raises:
            WeightSyncError: ``meta`` has an unknown dtype or a duplicate name.
        """
        if self._plan is None or not self._plan.matches(meta, bucket_bytes):
            self._plan = BucketPlan(meta, bucket_bytes)
        return self._plan

    def release(self) -> None:
        """Release the connection and the packing buffers; called by :meth:`PeerGroup.close`. Idempotent."""
        self._packing_buffers = []
        self._close()
