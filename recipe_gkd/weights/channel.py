"""A private process group between the actor's rank 0 and the rollout workers, in which every wait has a deadline.

A TCP store carries short notes (who is there, who failed and why), a gloo or NCCL group carries the buckets. Neither
touches ``torch.distributed``'s default group, which belongs to Megatron on one end and to vLLM on the other. The store
is plain TCP without authentication, as all of ``torch.distributed``: keep it inside the cluster's network.

Lifecycle: ``open_store`` on rank 0 -> everybody ``Channel(...)`` at the same time -> any number of updates ->
``close``. After any failure a channel is dead, because a collective that was given up cannot be told from a late one:
build a new one, on a new port.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError

_POLL_S = 0.0002
_INTERRUPT_S = 5.0
_FAILED = "failed: "
_MEETING = "meeting"
"""Key of the number of the meeting that rank 0 has come to last."""


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Rank 0's end of the store, on a port that the system chooses (``store.port``)."""
    return dist.TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Another rank's end. Raises :class:`WeightSyncError` when nobody listens there."""
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except dist.DistError as error:
        raise WeightSyncError(
            f"weight channel, connect: nobody answered at {host}:{port} within {timeout_s:g} s ({_flat(error)}); "
            "check that the actor's rank 0 lives and that this port is open between the two machines"
        ) from error


class Channel:
    """One end of the group. Rank 0 sends; ``labels[rank]`` is what errors call a rank.

    All ends go through the same sequence of meetings (:meth:`meet`) and broadcasts, and no end enters a broadcast
    before all have met for it. So whoever fails or stays away is found at a meeting, with a name and a reason, and not
    inside a collective, which could tell neither, and which NCCL could not leave.

    The constructor returns when all have arrived, or raises :class:`DeadlineError` (naming, on rank 0, who is missing).
    """

    def __init__(
        self, store: dist.TCPStore, *, rank: int, labels: Sequence[str], device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.labels, self.device, self.timeout_s = rank, list(labels), device, timeout_s
        self.world = len(self.labels)
        self._store = store
        self._group: Any = None
        self._dead: str | None = None
        self._n_meetings = 0
        self.begin_update()
        self.meet("connect")
        try:
            self._group = _process_group(store, rank, self.world, device, timeout_s)
        except RuntimeError as error:
            self.fail("connect", error)

    def begin_update(self) -> None:
        """From now on ``timeout_s`` runs, for all waits of this update together."""
        self._deadline = time.monotonic() + self.timeout_s

    def meet(self, phase: str, text: str = "") -> dict[int, str]:
        """Wait for the others. Rank 0 gets what each of them said, {rank: text}; the others get what rank 0 said.

        Rank 0 answers when all have come. Raises :class:`WeightSyncError` if somebody came to report a failure.
        """
        self.check_alive()
        self._n_meetings += 1
        self._forget(self._n_meetings - 2)
        if self.rank == 0:
            self._store.set(_MEETING, str(self._n_meetings))
        else:
            self._say(text)
        heard = self._hear(range(1, self.world) if self.rank == 0 else [0], phase)
        if self.rank == 0:
            self._say(text)
        return heard

    def _say(self, text: str) -> None:
        self._store.set(_key(self._n_meetings, self.rank), text)

    def _forget(self, meeting: int) -> None:
        """Delete what this end said then, or the store would grow by a note a rank and meeting, forever.

        At its meeting m an end has heard the others at m - 1, where nobody comes before having heard all of m - 2.
        """
        self._store.delete_key(_key(meeting, self.rank))

    def _hear(self, ranks: Sequence[int], phase: str) -> dict[int, str]:
        keys = {rank: _key(self._n_meetings, rank) for rank in ranks}
        try:
            self._store.wait(list(keys.values()), self._left())
            heard = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        except dist.DistError as error:
            silent = [rank for rank, key in keys.items() if not self._has(key)]
            self.fail(phase, error, silent=silent or ranks)
        if any(text.startswith(_FAILED) for text in heard.values()):
            self.fail(phase, WeightSyncError(f"weight channel, {phase}: {self._reports()}"))
        return heard

    def broadcast(self, buffer_U: torch.Tensor) -> dist.Work:
        """Start to send (rank 0) or receive a bucket; it may not be touched until :meth:`finish`."""
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
            others = [rank for rank in range(self.world) if rank != self.rank]
            self.fail(phase, error, silent=others if self.rank == 0 else [0])

    def _finish_on_stream(self, work: dist.Work) -> None:
        # NCCL's ``Work.wait`` only orders streams, so the host has to look for itself whether the bucket went through.
        while not work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError("timed out")
            time.sleep(_POLL_S)
        work.wait()

    # Failure.

    def fail(self, phase: str, error: BaseException, *, silent: Sequence[int] = ()) -> NoReturn:
        """Close the channel, and raise the error that tells why; the others learn it at the next meeting.

        ``silent``: the ranks that are to blame if the reason is that the time is over.
        """
        reports = self._reports()
        told = f"; {reports}" if reports else ""
        own = self._label(self.rank)
        late = time.monotonic() > self._deadline - 0.05 * self.timeout_s
        if isinstance(error, GkdError):
            failure: GkdError = error
        elif silent and late:
            failure = DeadlineError(
                f"weight channel, {phase}: {', '.join(self._label(rank) for rank in silent)} did not answer {own} "
                f"within {self.timeout_s:g} s (actor_rollout_ref.nccl_timeout){told}; look at the silent one's "
                "log, or raise that key if the model needs longer"
            )
        else:
            failure = WeightSyncError(f"weight channel, {phase}: {own} failed: {_flat(error)}{told}")
        self.abandon(str(failure))
        raise failure from error

    def abandon(self, reason: str) -> None:
        """Close because of ``reason``, and leave word of it at the present and the next meeting."""
        if self._dead is not None:
            return
        self.close(reason)
        with contextlib.suppress(dist.DistError):  # the store's process may be gone, with all who could read this
            self._say(_FAILED + reason[:1000])
            self._n_meetings += 1
            self._say(_FAILED + reason[:1000])

    def _reports(self) -> str:
        """Why others have failed, as far as they left word."""
        found: dict[str, str] = {}
        for rank in range(self.world):
            for meeting in (self._n_meetings, self._n_meetings + 1):
                if rank != self.rank and self._has(key := _key(meeting, rank)):
                    text = self._store.get(key).decode()
                    if text.startswith(_FAILED):
                        found[self._label(rank)] = text.removeprefix(_FAILED)
        return "; ".join(f"{label} reported: {text}" for label, text in found.items())

    def check_alive(self) -> None:
        if self._dead is not None:
            raise WeightSyncError(f"this weight channel is closed ({self._dead}); connect a new one")

    def close(self, reason: str = "on request") -> None:
        """Idempotent. Peers that wait in a broadcast with this end fail, at the latest at their deadline."""
        if self._dead is None:
            self._dead = reason
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except dist.DistError:
            return False  # the store's own process is gone

    def _left(self) -> timedelta:
        """At least a moment: to torch, a timeout of nothing means the default one."""
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))

    def _label(self, rank: int) -> str:
        return f"{self.labels[rank]} (channel rank {rank} of {self.world})"


def interrupt(host: str, port: int, world: int, reason: str) -> None:
    """Let rank 0 fail at its next meeting, and through it all others: for a driver that knows that somebody has died.

    Without it they would wait for the dead one until their deadline. Does nothing if the store is gone.
    """
    with contextlib.suppress(dist.DistError, WeightSyncError):
        store = join_store(host, port, _INTERRUPT_S)
        present = int(store.get(_MEETING))
        for rank in range(1, world):
            for meeting in (present, present + 1):
                store.set(_key(meeting, rank), _FAILED + reason[:1000])


def _key(meeting: int, rank: int) -> str:
    return f"{meeting}/{rank}"


def _process_group(store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float) -> Any:
    prefixed = dist.PrefixStore("group", store)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        # NCCL's own watchdog would end the process; it must never be earlier than our deadline.
        nccl._timeout = timedelta(seconds=2 * timeout_s + 60)
        return dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=timeout_s)
    assert isinstance(store, dist.TCPStore)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address_towards(store.host))]
    return dist.ProcessGroupGloo(prefixed, rank, world, gloo)


def _own_address_towards(host: str) -> str:
    """The address of the interface that leads to ``host``; gloo's own choice, the host name's, may be unreachable."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: chooses the route and sends nothing
        return str(probe.getsockname()[0])


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
