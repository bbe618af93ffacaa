"""A private process group between the actor's rank 0 and the rollout workers, in which every wait has a deadline.

A TCP store carries short notes (who is ready, who failed and why), a gloo or NCCL group carries the buckets. Neither
touches ``torch.distributed``'s default group, which belongs to Megatron on one end and to vLLM on the other. The store
is plain TCP without authentication, as all of ``torch.distributed``: keep it inside the cluster's network.

Lifecycle: ``open_store`` on rank 0 -> everybody ``Channel(...)`` at the same time -> any number of updates -> ``close``.
After any failure a channel is dead, because a collective that was given up cannot be told from a late one: build a new
one, on a new port.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError

_POLL_S = 0.0002


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Rank 0's end of the store, on a port that the system chooses (``store.port``)."""
    return dist.TCPStore(
        host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Another rank's end. Raises :class:`WeightSyncError` when nobody listens there."""
    try:
        return dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except dist.DistError as error:
        raise WeightSyncError(
            f"weight channel, connect: nobody answered at {host}:{port} within {timeout_s:g} s ({_flat(error)}); "
            "check that the actor's rank 0 lives and that this port is open between the two machines"
        ) from error


class Channel:
    """One end of the group. Rank 0 sends; ``labels[rank]`` is what errors call a rank.

    The constructor returns when all have arrived, or raises :class:`DeadlineError` (naming, on rank 0, who is missing).
    """

    def __init__(
        self,
        store: dist.TCPStore,
        *,
        rank: int,
        labels: Sequence[str],
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.rank, self.labels, self.device, self.timeout_s = rank, list(labels), device, timeout_s
        self.world = len(self.labels)
        self._round = 0
        self._deadline = time.monotonic() + timeout_s
        self._store = store
        self._group: Any = None
        self._dead: str | None = None
        try:
            self._meet()
            self._group = _process_group(store, rank, self.world, device, timeout_s)
        except dist.DistError as error:
            self.fail("connect", error)
        except RuntimeError as error:
            if isinstance(error, GkdError):
                raise
            self.fail("connect", error)

    def _meet(self) -> None:
        """Arrivals go through the store first, since a group that is built with somebody missing cannot say who."""
        if self.rank == 0:
            self.collect("arrived", "connect")
            self.announce("all arrived", "")
        else:
            self.post("arrived", "")
            self.hear("all arrived", "connect")

    def begin_update(self) -> None:
        """Each end calls it once an update; from now on ``timeout_s`` runs, for all waits of this update together."""
        self._round += 1
        self._deadline = time.monotonic() + self.timeout_s

    def _left(self) -> timedelta:
        """At least a moment: to torch, a timeout of nothing means the default one."""
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    # Notes. A stage is a name within the present update.

    def post(self, stage: str, text: str) -> None:
        """Tell rank 0."""
        self._store.set(f"{self._round}/{stage}/{self.rank}", text)

    def announce(self, stage: str, text: str) -> None:
        """Rank 0 tells everybody."""
        self._store.set(f"{self._round}/{stage}", text)

    def collect(self, stage: str, phase: str) -> dict[int, str]:
        """Rank 0 waits for every other rank's post; {rank: text}."""
        self.check_alive()
        keys = {rank: f"{self._round}/{stage}/{rank}" for rank in range(1, self.world)}
        self._wait_for(list(keys.values()), phase)
        return {rank: self._store.get(key).decode() for rank, key in keys.items()}

    def hear(self, stage: str, phase: str) -> str:
        """Wait for an announcement of rank 0."""
        self.check_alive()
        key = f"{self._round}/{stage}"
        self._wait_for([key], phase)
        return self._store.get(key).decode()

    def _wait_for(self, keys: list[str], phase: str) -> None:
        if not keys:
            return
        try:
            self._store.wait(keys, self._left())
        except dist.DistError as error:
            missing = [key for key in keys if not self._has(key)]
            if self.rank == 0 and missing:
                ranks = [int(key.rsplit("/", 1)[1]) for key in missing]
                who = ", ".join(self._label(rank) for rank in ranks)
            else:
                who = self._label(0)
            self.fail(phase, error, silent=who)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except dist.DistError:
            return False  # the store's own process is gone

    # Buckets.

    def broadcast(self, buffer_U: torch.Tensor) -> dist.Work:
        """Start to send (rank 0) or receive a bucket; it may not be touched until :meth:`finish`."""
        self.check_alive()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._left()
        return self._group.broadcast([buffer_U], options)

    def finish(self, work: dist.Work, phase: str) -> None:
        """Wait for a started bucket. Raises :class:`DeadlineError` or, for a broken link, :class:`WeightSyncError`."""
        try:
            if self.device.type == "cuda":
                self._finish_on_stream(work)
            else:
                work.wait(self._left())
        except RuntimeError as error:
            self.fail(phase, error, silent=self._suspects())

    def _finish_on_stream(self, work: dist.Work) -> None:
        # ``Work.wait`` of NCCL only orders streams; the host has to look for itself whether the peers came.
        while not work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError("timed out")
            time.sleep(_POLL_S)
        work.wait()

    def progress(self, n_received: int) -> None:
        """A receiver notes how many buckets it has, so that the sender can name who stopped."""
        self._store.set(f"{self._round}/received/{self.rank}", str(n_received))

    def _suspects(self) -> str:
        """On rank 0, the ranks that are furthest behind; elsewhere rank 0."""
        if self.rank != 0:
            return self._label(0)
        received = {
            rank: int(self._store.get(key)) if self._has(key := f"{self._round}/received/{rank}") else 0
            for rank in range(1, self.world)
        }
        least = min(received.values(), default=0)
        return ", ".join(self._label(rank) for rank, count in received.items() if count == least)

    # Failure.

    def fail(self, phase: str, error: BaseException, *, silent: str | None = None) -> NoReturn:
        """Leave word of the failure for the others, close the channel, and raise the error that tells it.

        ``silent``: who is to blame if the reason is that the time is over.
        """
        reports = self._reports()
        told = f"; {reports}" if reports else ""
        late = time.monotonic() > self._deadline - 0.05 * self.timeout_s
        if silent is not None and late:
            failure: GkdError = DeadlineError(
                f"weight channel, {phase}: {silent} did not answer {self._label(self.rank)} within "
                f"{self.timeout_s:g} s (actor_rollout_ref.nccl_timeout){told}; look at the log of the silent one, "
                "or raise that key if the model needs longer"
            )
        elif isinstance(error, GkdError):
            failure = error
        else:
            failure = WeightSyncError(
                f"weight channel, {phase}: {self._label(self.rank)} lost the connection or failed: "
                f"{_flat(error)}{told}"
            )
        self.abandon(f"{phase}: {failure}")
        raise failure from error

    def abandon(self, reason: str) -> None:
        """Close because of ``reason``, and tell the others."""
        if self._dead is None:
            try:
                self._store.set(f"{self._round}/failed/{self.rank}", reason[:1000])
            except dist.DistError:
                pass  # the store's process is gone, and with it everybody who could read this
            self.close(reason)

    def _reports(self) -> str:
        """What other ranks left word of."""
        keys = {rank: f"{self._round}/failed/{rank}" for rank in range(self.world) if rank != self.rank}
        try:
            found = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._has(key)}
        except dist.DistError:
            return ""
        return "; ".join(f"{self._label(rank)} reported: {text}" for rank, text in found.items())

    def check_alive(self) -> None:
        if self._dead is not None:
            raise WeightSyncError(f"this weight channel is closed ({self._dead}); connect a new one")

    @property
    def alive(self) -> bool:
        return self._dead is None

    def close(self, reason: str = "closed on request") -> None:
        """Idempotent. The peers that wait for this end fail at once (gloo), or at their deadline (NCCL)."""
        if self._dead is None:
            self._dead = reason
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _label(self, rank: int) -> str:
        return f"{self.labels[rank]} (channel rank {rank} of {self.world})"


def _process_group(store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    prefixed = dist.PrefixStore("group", store)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # NCCL's own watchdog would end the process; it must never be earlier than our deadline.
        nccl._timeout = timedelta(seconds=2 * timeout_s + 60)
        return dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timedelta(seconds=timeout_s)
    assert isinstance(store, dist.TCPStore)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address_towards(store.host))]
    return dist.ProcessGroupGloo(prefixed, rank, world, gloo)


def _own_address_towards(host: str) -> str:
    """The address of the interface that leads to ``host``; gloo's own choice (the host name's) need not be reachable."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: chooses the route and sends nothing
        return str(probe.getsockname()[0])


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
