"""Private process group of a transport: gloo between CPUs, NCCL between GPUs.

It is independent of the default group of ``torch.distributed``, which Megatron uses on rank 0 and vLLM on other ranks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recipe_gkd.runtime.interfaces import own_address_toward

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.0002
_STORE_POLL_INTERVAL_S = 0.002
_PROBE_BYTES = 8
_ABORT_TIMEOUT_S = 2.0
_CONNECT_MARGIN_S = 5.0
"""Time by which torch's own timeouts are later than the transport's deadline, whose error names the silent ranks."""

# torch reads these variables in the constructor of each group. Errors of this group concern the weight sync alone.
_NCCL_VARIABLES = {
    # Between nodes, NCCL reports a dead peer to the group's watchdog, which by default ends this process. The transport
    # polls its transfers and has a deadline, so the watchdog only logs the error.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # After an error the watchdog sleeps four times this, and the destruction of the group waits for the watchdog.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}


class PrivateGroup:
    """Group of all ranks of a transport.

    Lifecycle::

        group = PrivateGroup(store, rank=rank, world=world, device=device, timeout_s=timeout_s, stop=stop)
        group.probe()                           # creates all connections; may block without a deadline
        work = group.broadcast(buffer_U, left)  # any number of times
        group.end()

    The constructor and :meth:`probe` wait for the other ranks. Call both in a thread that can be abandoned.

    Args:
        store: Store of the transport.
        world: Number of ranks.
        device: Device of the transferred tensors.
        timeout_s: Deadline of an update.
        stop: Event that ends the waits of the constructor and of :meth:`probe`.

    Raises:
        RuntimeError: The connection failed, or ``stop`` was set.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        *,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float,
        stop: threading.Event,
    ) -> None:
        self._device, self._timeout_s, self._stop = device, timeout_s, stop
        # C++ does not keep a Python object alive, so the store must live as long as the group.
        self._store = _InterruptibleStore(store, timeout_s + _CONNECT_MARGIN_S, stop)
        prefixed = dist.PrefixStore("group", self._store)
        self._group: Any = (
            _nccl_group(prefixed, rank, world, timeout_s)
            if device.type == "cuda"
            else _gloo_group(prefixed, rank, world, timeout_s, host=store.host)
        )

    def broadcast(self, buffer_U: torch.Tensor, timeout: timedelta) -> dist.Work:
        """Start the broadcast of a buffer from rank 0.

        Args:
            buffer_U: Buffer, uint8 [U].
            timeout: Deadline for gloo. NCCL ignores it, so a wait for a transfer on CUDA must have its own.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timeout
        return self._group.broadcast([buffer_U], options)

    def probe(self) -> None:
        """Broadcast a few bytes, so that all connections exist before the first update.

        On CUDA this blocks in ``ncclCommInitRank``, which has no deadline and cannot be interrupted.

        Raises:
            RuntimeError: The broadcast failed, or ``stop`` was set.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is a property of the thread
        probe_U = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=self._device)
        work = self.broadcast(probe_U, timedelta(seconds=self._timeout_s + _CONNECT_MARGIN_S))
        while not work.is_completed():
            if self._stop.is_set():
                raise RuntimeError("the connection was given up")
            time.sleep(POLL_INTERVAL_S)
        work.wait()  # raises the error of the broadcast

    def end(self) -> None:
        """Abort the group, even during a transfer. Returns after 2 s at the latest. Idempotent.

        NCCL's abort can block if a connection to a dead peer is stuck. Its thread is then abandoned.
        """
        if self._group is None:
            return
        # The thread gets the last reference to the group, because the destruction waits for NCCL's threads.
        parts, self._group = [self._group, self._store], None
        thread = threading.Thread(target=_abort, args=(parts,), name="abort-weight-group", daemon=True)
        thread.start()
        thread.join(_ABORT_TIMEOUT_S)
        if thread.is_alive():
            log.warning("the connection of a weight transport did not close within %g s; continuing", _ABORT_TIMEOUT_S)


class _InterruptibleStore(dist.Store):
    """Access of a group to the store of a transport, with waits that can be interrupted.

    A wait of torch's client blocks all other threads that use the client. A separate client would be one more
    connection for each rank.

    Args:
        store: Store of the transport.
        timeout_s: Deadline of each wait.
        stop: Event that ends all waits.
    """

    def __init__(self, store: dist.TCPStore, timeout_s: float, stop: threading.Event) -> None:
        super().__init__()
        self._store, self._timeout_s, self._stop = store, timeout_s, stop

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return True if the store has all keys."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            RuntimeError: A key did not arrive in time, or ``stop`` was set.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self._store.check(keys):
            if self._stop.is_set() or time.monotonic() > deadline:
                raise RuntimeError(f"no {', '.join(keys)} in the store")
            time.sleep(_STORE_POLL_INTERVAL_S)


def _nccl_group(store: dist.Store, rank: int, world: int, timeout_s: float) -> dist.ProcessGroupNCCL:
    """Return a group of NCCL. Its communicator is only created by the first transfer."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout_s + 60)  # later than the transport's own deadline
    with _environment(_NCCL_VARIABLES):
        return dist.ProcessGroupNCCL(store, rank, world, options)


def _gloo_group(store: dist.Store, rank: int, world: int, timeout_s: float, *, host: str) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s + _CONNECT_MARGIN_S)
    options._devices = _gloo_devices(host)
    return dist.ProcessGroupGloo(store, rank, world, options)


def _gloo_devices(host: str) -> list[Any]:
    """Return the devices of gloo: the interfaces that the user has chosen, or the one that leads to ``host``.

    By itself gloo would take the address of the host name, which other machines may not reach.
    """
    create = dist.ProcessGroupGloo.create_device
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [create(interface=name.strip()) for name in names.split(",")]
    return [create(hostname=own_address_toward(host))]


def _abort(parts: list[Any]) -> None:
    """Abort and destroy the group ``parts[0]``; the store ``parts[1]`` must live longer."""
    parts[0].abort()
    del parts[0]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
