"""What every transport of weights has: meetings in a store, a deadline on every wait, and failures that have a name.

A TCP store carries short notes (who is there, who failed and why); how the buckets go is the subclass's affair. The
store is plain TCP without authentication, as all of ``torch.distributed``: keep it inside the cluster's network.

Lifecycle: ``open_store`` on rank 0 -> everybody ``connect`` (see connect.py) at the same time -> any number of updates
-> ``close``. After any failure a transport is dead, because a transfer that was given up cannot be told from a late
one: build a new one, on a new port.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import Plan, TensorMeta
from recipe_gkd.weight_sync.host_memory import BufferPool, host_buffer

_INTERRUPT_S = 2.0
_NOTE_S = 1.0
_FAILED = "failed: "
_INTERRUPTED = "interrupted"
_AWAITED = "awaited"
"""The keys of the notes that rank 0 waits for, or waited for last."""


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Rank 0's end of the store, on a port that the system chooses (``store.port``)."""
    return dist.TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Another rank's end. Raises :class:`WeightSyncError` when nobody listens there."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except dist.DistError as error:
        raise WeightSyncError(
            f"weight channel, connect: nobody answered at {host}:{port} within {timeout_s:g} s ({flat(error)}); "
            "check that the actor's rank 0 lives and that this port is open between the two machines"
        ) from error


def interrupt(host: str, port: int, reason: str) -> None:
    """Let rank 0 fail at its present or next wait, and through it all others: for whoever knows of a death, say.

    Without it they would wait for the dead one until their deadline. Does nothing if the store is gone; returns within
    2 s even if its process is stopped, which torch would wait for without end.
    """
    thread = threading.Thread(target=_interrupt, args=(host, port, reason), name="interrupt-weights", daemon=True)
    thread.start()
    thread.join(_INTERRUPT_S)


def _interrupt(host: str, port: int, reason: str) -> None:
    with contextlib.suppress(OSError, dist.DistError, WeightSyncError):
        socket.create_connection((host, port), timeout=_INTERRUPT_S).close()  # refused at once, where torch tries again
        store = join_store(host, port, _INTERRUPT_S)
        store.set(_INTERRUPTED, reason[:1000])  # first: rank 0 writes _AWAITED before it looks here
        for key in store.get(_AWAITED).decode().split() if store.check([_AWAITED]) else ():
            store.set(key, _FAILED)


class Transport:
    """One end. Rank 0 sends; ``labels[rank]`` is what errors call a rank.

    All ends go through the same sequence of meetings (:meth:`meet`) and broadcasts, and no end enters a broadcast
    before all have met for it. So whoever fails or stays away is found at a meeting, with a name and a reason, and not
    inside a collective, which could tell neither, and which NCCL could not leave. Meetings run ahead: all may meet for
    the next bucket while the last one is on its way.

    Only one thread at a time may use it. The constructor returns when all have arrived, or raises
    :class:`DeadlineError` (naming, on rank 0, who is missing).

    No deadline holds on other ranks while rank 0's process is stopped: torch asks its store without one. They go on
    when it does, or ends: whoever drives all ends has deadlines of its own, and kills it.
    """

    sends_in_place = False
    """Whether :meth:`broadcast` takes any memory of the device, not only that of :meth:`buffers`."""

    def __init__(
        self, store: dist.TCPStore, *, rank: int, labels: Sequence[str], device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.labels, self.device, self.timeout_s = rank, list(labels), device, timeout_s
        self.world = len(self.labels)
        self.others = range(1, self.world) if rank == 0 else range(1)
        """Whom this end hears: rank 0 all of them, and they rank 0."""
        self.store = store
        self._dead: str | None = None
        self._n_meetings = 0
        self._plan: Plan | None = None
        self._packed: list[torch.Tensor] = []
        self._pool = BufferPool(device)
        self.begin_update()
        self.rendezvous("connect")
        try:
            self._open()
        except GkdError as error:
            self.abandon(str(error))
            raise
        except (RuntimeError, OSError) as error:
            self.fail("connect", error)

    # What a transport does its own way.

    def _open(self) -> None:
        """Build what the buckets go over; all ends do it together."""

    def _close(self) -> None:
        """Give it up, even in the middle of a broadcast."""

    def broadcast(self, buffer_U: torch.Tensor) -> Any:
        """Start to send (rank 0) or receive a bucket; it may not be touched until :meth:`finish` of what is returned.

        Rank 0's is from :meth:`buffers` or :meth:`allocate`, unless the transport sends in place. At most two may be on
        their way at a time.
        """
        raise NotImplementedError

    def finish(self, work: Any, phase: str) -> None:
        """Wait for a started bucket. Raises :class:`DeadlineError` or, for a broken link, :class:`WeightSyncError`."""
        raise NotImplementedError

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """Memory that rank 0 can send from: uint8 [n_bytes]."""
        if self.device.type == "cuda":
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        return host_buffer(n_bytes)

    # Buffers.

    def plan(self, meta: Sequence[TensorMeta], bucket_bytes: int) -> Plan:
        if self._plan is None or not self._plan.is_of(meta, bucket_bytes):
            self._plan = Plan(meta, bucket_bytes)
        return self._plan

    def buffers(self, n: int, n_bytes: int) -> list[torch.Tensor]:
        """To pack into, on rank 0: kept from update to update if they lie in host memory, which is slow to get."""
        kept = [buffer_U for buffer_U in self._packed if buffer_U.numel() >= n_bytes][:n]
        made = kept + [self.allocate(n_bytes) for _ in range(n - len(kept))]
        self._packed = [buffer_U for buffer_U in made if buffer_U.device.type == "cpu"]
        return [buffer_U[:n_bytes] for buffer_U in made]

    def receive_buffer(self, n_bytes: int) -> torch.Tensor:
        """To receive into; it is used again when nobody holds a tensor in it any more."""
        return self._pool.lend(n_bytes)

    # Meetings.

    def begin_update(self) -> None:
        """From now on ``timeout_s`` runs, for all waits of this update together."""
        self.deadline = time.monotonic() + self.timeout_s

    def rendezvous(self, phase: str, text: str = "") -> dict[int, str]:
        """Wait for the others. Rank 0 gets what each of them said, {rank: text}; the others get what rank 0 said.

        Rank 0 answers when all have come. Raises :class:`WeightSyncError` if somebody came to report a failure.
        """
        self.check_alive()
        self._n_meetings += 1
        if self.rank != 0:
            self.publish(self._n_meetings, text)
        heard = self.collect(self._n_meetings, phase)
        if self.rank == 0:
            self.publish(self._n_meetings, text)
        self.retract(self._n_meetings - 2)  # where everybody has been: nobody comes to m + 2 before all have heard m
        return heard

    def publish(self, topic: object, text: str) -> None:
        """Leave a note; it stays in the store, on rank 0, until :meth:`unsay`."""
        self.store.set(_key(topic, self.rank), text)

    def retract(self, topic: object) -> None:
        self.store.delete_key(_key(topic, self.rank))

    def collect(self, topic: object, phase: str) -> dict[int, str]:
        """What each of the others says of ``topic``; waits for it."""
        keys = {rank: _key(topic, rank) for rank in self.others}
        try:
            if self.rank == 0:
                self.store.set(_AWAITED, " ".join(keys.values()))
                self.check_interrupted(phase)
            self.store.set_timeout(self.left())
            said = self.store.multi_get(list(keys.values()))
        except dist.DistNetworkError as error:
            lost = f"{self.label(self.rank)} has lost {self.label(0)}, whose process holds the store ({flat(error)})"
            self.fail(phase, WeightSyncError(f"weight channel, {phase}: {lost}; look at that one's log"))
        except dist.DistError as error:
            silent = [rank for rank, key in keys.items() if not self._has(key)]
            self.fail(phase, error, silent=silent or self.others)
        heard = {rank: text.decode() for rank, text in zip(keys, said, strict=True)}
        if failed := {rank: text for rank, text in heard.items() if text.startswith(_FAILED)}:
            self.check_interrupted(phase)
            self.fail(phase, WeightSyncError(f"weight channel, {phase}: {self._told(failed)}"))
        return heard

    def check_interrupted(self, phase: str) -> None:
        if (reason := self._note(_INTERRUPTED)) is not None:
            self.fail(phase, WeightSyncError(f"weight channel, {phase}: {reason}"))

    def interrupt(self, reason: str) -> None:
        """:func:`interrupt`, which may be called while another thread of this end waits."""
        interrupt(self.store.host, self.store.port, f"{self.label(self.rank)} reported: {reason}")

    # Failure.

    def fail(self, phase: str, error: BaseException, *, silent: Sequence[int] = ()) -> NoReturn:
        """Close the transport, and raise the error that tells why; the others learn it when they next wait.

        ``silent``: the ranks that are to blame if the reason is that the time is over.
        """
        reports = self._reports()
        told = f"; {reports}" if reports else ""
        own = self.label(self.rank)
        late = time.monotonic() > self.deadline - 0.05 * self.timeout_s
        if isinstance(error, GkdError):
            failure: GkdError = error
        elif silent and late:
            failure = DeadlineError(
                f"weight channel, {phase}: {', '.join(self.label(rank) for rank in silent)} did not answer {own} "
                f"within {self.timeout_s:g} s (actor_rollout_ref.nccl_timeout){told}; look at the silent one's "
                "log, or raise that key if the model needs longer"
            )
        else:
            failure = WeightSyncError(f"weight channel, {phase}: {own} failed: {flat(error)}{told}")
        self.abandon(str(failure))
        if failure is error:
            raise failure
        raise failure from error

    def abandon(self, reason: str) -> None:
        """Close because of ``reason``, and leave word of it at the present and the next meeting."""
        if self._dead is not None:
            return
        self.close(reason)
        with contextlib.suppress(dist.DistError):  # the store's process may be gone, with all who could read this
            for topic in self._due():
                self.publish(topic, _FAILED + reason[:1000])

    def _due(self) -> list[object]:
        """Topics of which others wait, or may soon wait, for this end's notes."""
        return [self._n_meetings, self._n_meetings + 1]

    def _reports(self) -> str:
        """Why others have failed, as far as they left word."""
        found: dict[int, str] = {}
        for rank in range(self.world):
            for topic in self._due():
                if rank != self.rank and (note := self._note(_key(topic, rank))) is not None:
                    found[rank] = note
        return self._told({rank: text for rank, text in found.items() if text.startswith(_FAILED)})

    def _told(self, failed: dict[int, str]) -> str:
        told = {rank: text.removeprefix(_FAILED) for rank, text in failed.items()}
        return "; ".join(f"{self.label(rank)} reported: {text}" for rank, text in told.items() if text)

    def check_alive(self) -> None:
        if self._dead is not None:
            raise WeightSyncError(f"this weight channel is closed ({self._dead}); connect a new one")

    def close(self, reason: str = "on request") -> None:
        """Idempotent. Peers that wait in a broadcast with this end fail, at the latest at their deadline."""
        if self._dead is None:
            self._dead = reason
        self._packed = []
        self._close()

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except dist.DistError:
            return False  # the store's own process is gone

    def _note(self, key: str) -> str | None:
        """What is there already; None, too, if the store cannot tell."""
        if not self._has(key):
            return None
        self.store.set_timeout(timedelta(seconds=_NOTE_S))  # that of the last wait may be over
        try:
            return str(self.store.get(key).decode())
        except dist.DistError:
            return None

    def left(self) -> timedelta:
        """At least a moment: to torch, a timeout of nothing means the default one."""
        return timedelta(seconds=max(0.001, self.deadline - time.monotonic()))

    def label(self, rank: int) -> str:
        return f"{self.labels[rank]} (channel rank {rank} of {self.world})"


def _key(topic: object, rank: int) -> str:
    return f"{topic}/{rank}"


def flat(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
