"""Messages of the ranks of a transport, in a TCP store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_READ_TIMEOUT_S = 1.0

Topic = int | str


class Mailbox:
    """One rank's access to the messages of all ranks. A message stays in the store until its sender retracts it.

    Args:
        store: The store, on rank 0, or a client of it.
        rank: Rank of the sender.
    """

    def __init__(self, store: dist.TCPStore, rank: int) -> None:
        self.store, self._rank = store, rank

    def publish(self, topic: Topic, text: str) -> None:
        """Store a message of this rank under ``topic``."""
        self.store.set(message_key(topic, self._rank), text)

    def retract(self, topic: Topic) -> None:
        """Remove this rank's message of ``topic``, if there is one."""
        self.store.delete_key(message_key(topic, self._rank))

    def has(self, key: str) -> bool:
        """Return True if the store has ``key``, False if not or if the store's process is gone."""
        try:
            return bool(self.store.check([key]))
        except dist.DistError:
            return False

    def read(self, key: str) -> str | None:
        """Return a value without waiting for it; None if there is none, or if the store does not answer."""
        if not self.has(key):
            return None
        self.store.set_timeout(timedelta(seconds=_READ_TIMEOUT_S))  # the timeout of the last wait may have passed
        try:
            return str(self.store.get(key).decode())
        except dist.DistError:
            return None


def message_key(topic: Topic, rank: int) -> str:
    """Return the key of a rank's message."""
    return f"{topic}/{rank}"
