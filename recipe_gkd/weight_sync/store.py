"""The TCP store of a transport: open it on rank 0, join it from other ranks, and interrupt all ranks through it.

The store is plain TCP without authentication, like everything in ``torch.distributed``: keep it inside the cluster's
network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from recipe_gkd.errors import WeightSyncError

INTERRUPTED_KEY = "interrupted"
"""Key of the reason why a driver has interrupted the update."""
AWAITED_KEY = "awaited"
"""Key of the list of keys that rank 0 waits for, or waited for last."""
FAILED_PREFIX = "failed: "
"""Start of a message that reports the failure of its sender."""
MAX_REASON_CHARS = 1000
_INTERRUPT_TIMEOUT_S = 2.0


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Return a new store on rank 0, at a port that the operating system chooses (``store.port``).

    Args:
        host: Address of this machine in the cluster.
        timeout_s: Default deadline of the store's operations.
    """
    return dist.TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Return a client of rank 0's store.

    Args:
        host: Address of rank 0's machine.
        port: Port of the store.
        timeout_s: Deadline of the connection, and default deadline of the store's operations.

    Raises:
        WeightSyncError: There is no store at this address.
    """
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except dist.DistError as error:
        raise WeightSyncError(
            f"no store at {host}:{port} within {timeout_s:g} s ({one_line(error)})",
            phase="weight transport, connect",
            remedy="check that the actor's rank 0 is alive and that this port is open between the two machines",
        ) from error


def interrupt(host: str, port: int, reason: str) -> None:
    """Make rank 0 fail in its current or next wait, and all other ranks through it.

    A driver calls it when it has found out that a rank is dead. Without it, the others would wait for that rank until
    their deadline. Has no effect if the store is gone. Returns within 2 s even if rank 0's process is stopped, which
    torch would wait for without a deadline.

    Args:
        host: Address of rank 0's machine.
        port: Port of the store.
        reason: Text of the error that the ranks raise.
    """
    thread = threading.Thread(target=_interrupt, args=(host, port, reason), name="interrupt-weights", daemon=True)
    thread.start()
    thread.join(_INTERRUPT_TIMEOUT_S)


def _interrupt(host: str, port: int, reason: str) -> None:
    with contextlib.suppress(OSError, dist.DistError, WeightSyncError):
        # A closed port is refused at once here; TCPStore would retry until its timeout.
        socket.create_connection((host, port), timeout=_INTERRUPT_TIMEOUT_S).close()
        store = join_store(host, port, _INTERRUPT_TIMEOUT_S)
        # This key goes first: rank 0 sets AWAITED_KEY before it reads INTERRUPTED_KEY.
        store.set(INTERRUPTED_KEY, reason[:MAX_REASON_CHARS])
        for key in store.get(AWAITED_KEY).decode().split() if store.check([AWAITED_KEY]) else ():
            store.set(key, FAILED_PREFIX)


def one_line(error: BaseException) -> str:
    """Return an exception's message on one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
