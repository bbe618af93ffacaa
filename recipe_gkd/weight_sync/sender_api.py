"""What an actor worker delegates to: rank 0 sends what all ranks export together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.sender import send_weights
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.transport import Transport, open_store
from recipe_gkd.weight_sync.transport_factory import connect


class WeightSource(Protocol):
    """A model in training, as seen from here."""

    def weights_meta(self) -> list[TensorMeta]:
        """Hugging Face names, full shapes and dtypes, in the order of the export; the same on every rank."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A collective: every actor rank iterates it in step. Global rank 0 gets the full tensors."""


class WeightSenderApi:
    """One a rank. ``rank`` is the global rank in the actor pool; only rank 0 opens a channel.

    Every actor rank calls :meth:`send` at the same time; when rank 0 fails it still iterates the export to its end, so
    that no other actor rank is left alone in a collective.
    """

    def __init__(self, source: WeightSource, *, rank: int, device: torch.device, timeout_s: float) -> None:
        self._source, self._rank, self._device, self._timeout_s = source, rank, device, timeout_s
        self._store: torch.distributed.TCPStore | None = None
        self._channel: Transport | None = None

    def open_store(self, host: str) -> tuple[str, int]:
        """Rank 0: open a new store under ``host``, this machine's address in the cluster; where others find it."""
        self.close()
        self._store = open_store(host, self._timeout_s)
        return host, self._store.port

    def connect(self, labels: list[str], transport: str) -> None:
        """Rank 0: wait for the others to join; see :func:`connect`."""
        if self._store is None:
            raise WeightSyncError("connect() came before open_store(); call them in that order on the actor's rank 0")
        self._channel = connect(
            transport, self._store, rank=0, labels=labels, device=self._device, timeout_s=self._timeout_s
        )

    def send(self, version: int, bucket_bytes: int) -> TransferStats | None:
        """Send the present weights as ``version``; the statistics on rank 0, None elsewhere."""
        tensors = self._source.export_weights()
        if self._rank != 0:
            _drain(tensors)
            return None
        try:
            if self._channel is None:
                raise WeightSyncError("the actor's rank 0 has no weight channel; connect one first")
            return send_weights(self._channel, version, self._source.weights_meta(), tensors, bucket_bytes)
        except BaseException:
            _drain(tensors)
            raise

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._store = None


def _drain(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in tensors:
        pass
