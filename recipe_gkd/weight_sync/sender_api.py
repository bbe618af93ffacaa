"""Methods of an actor worker for weight updates: rank 0 sends the tensors that all ranks export together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.sender import send_weights
from recipe_gkd.weight_sync.spec import TransportAddress
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.store import open_store
from recipe_gkd.weight_sync.transport import Transport
from recipe_gkd.weight_sync.transport_factory import open_transport


class WeightSource(Protocol):
    """A model in training."""

    def weights_meta(self) -> list[TensorMeta]:
        """Return Hugging Face names, full shapes and dtypes, in the order of the export; equal on every rank."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights. A collective: every actor rank iterates in step, and rank 0 gets the full tensors."""


class WeightSenderApi:
    """Weight updates on one rank of the actor pool.

    Lifecycle::

        api = WeightSenderApi(source, rank=rank, device=device, timeout_s=timeout_s)  # every rank
        host, port = api.open_store(host)                                             # rank 0
        api.connect(TransportAddress(host, port, "collective", labels))               # rank 0
        api.send(version, bucket_bytes)                                               # every rank, any number of times
        api.close()                                                                   # every rank

    If rank 0 fails, it still iterates the export to its end, so that no other actor rank waits in a collective.

    Args:
        source: Model in training.
        rank: Global rank in the actor pool. Only rank 0 opens a transport.
        device: Device of the exported tensors.
        timeout_s: Deadline of each update.
    """

    def __init__(self, source: WeightSource, *, rank: int, device: torch.device, timeout_s: float) -> None:
        self._source, self._rank, self._device, self._timeout_s = source, rank, device, timeout_s
        self._store: torch.distributed.TCPStore | None = None
        self._transport: Transport | None = None

    def open_store(self, host: str) -> tuple[str, int]:
        """Open a new store on rank 0, and return its host and port.

        Args:
            host: Address of this machine in the cluster.
        """
        self.close()
        self._store = open_store(host, self._timeout_s)
        return host, self._store.port

    def connect(self, address: TransportAddress) -> None:
        """Open the transport on rank 0, and wait until all other ranks have joined.

        Args:
            address: Transport to open, at the store of :meth:`open_store`.

        Raises:
            WeightSyncError: There is no store, or a rank reported a failure.
            DeadlineError: A rank did not join in time.
        """
        if self._store is None:
            raise WeightSyncError(
                "connect() was called before open_store()", remedy="call open_store() first, on actor rank 0"
            )
        self._transport = open_transport(
            address.transport,
            self._store,
            rank=0,
            labels=address.labels,
            device=self._device,
            timeout_s=self._timeout_s,
        )

    def send(self, version: int, bucket_bytes: int) -> TransferStats | None:
        """Send the current weights. Every actor rank calls it at the same time.

        Args:
            version: Version of the weights.
            bucket_bytes: Maximum size of a bucket.

        Returns:
            Statistics on rank 0, None on other ranks.

        Raises:
            WeightSyncError: See :func:`send_weights`.
            DeadlineError: See :func:`send_weights`.
        """
        tensors = self._source.export_weights()
        if self._rank != 0:
            _drain(tensors)
            return None
        try:
            if self._transport is None:
                raise WeightSyncError("actor rank 0 has no weight transport", remedy="call connect() first")
            return send_weights(self._transport, version, self._source.weights_meta(), tensors, bucket_bytes)
        except BaseException:
            _drain(tensors)
            raise

    def close(self) -> None:
        """Close the transport and the store. Idempotent."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._store = None


def _drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in tensors:
        pass
