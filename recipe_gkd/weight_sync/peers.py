"""Messages between the ranks of a transport: rendezvous, one deadline for each update, and failures with a reason."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn, Protocol

import torch.distributed as dist

from recipe_gkd.errors import DeadlineError, GkdError, WeightSyncError
from recipe_gkd.weight_sync.mailbox import Mailbox, Topic, message_key
from recipe_gkd.weight_sync.store import (
    AWAITED_KEY,
    FAILED_PREFIX,
    INTERRUPTED_KEY,
    MAX_REASON_CHARS,
    interrupt,
    one_line,
)

_LATE_FRACTION = 0.05
"""A wait that ends within this fraction of the timeout before the deadline counts as late."""


class TransportHooks(Protocol):
    """Methods of a transport that its group calls."""

    def release(self) -> None:
        """Release the connection and the buffers. Idempotent."""

    def bucket_topics(self) -> list[Topic]:
        """Return the topics of buckets for which other ranks may wait."""


class TransportClosed(WeightSyncError):
    """Use of a transport after a failure, or after it was left."""


class PeerGroup:
    """The ranks of one transport, which exchange short messages through a TCP store.

    Rank 0 collects messages from all other ranks, and each of them from rank 0 only.

    All ranks go through the same sequence of rendezvous and broadcasts, and no rank enters a broadcast before all ranks
    have reached the rendezvous in front of it. A rank that has failed or is missing is therefore found at a
    rendezvous, with its name and its reason. A collective could report neither, and NCCL could not leave it.

    Only one thread may use a group at a time, except for :meth:`interrupt`.

    Args:
        store: The store, on rank 0, or a client of it.
        rank: This rank, 0 for the sender.
        labels: Names of all ranks in error messages.
        timeout_s: Time for all waits of one update together.
        hooks: The transport. The reference is weak, so that a discarded transport closes its store at once.

    Attributes:
        mailbox: Messages in the store.
        others: Ranks from which this rank collects messages.
        deadline: Deadline of the current update, by ``time.monotonic()``.
    """

    def __init__(
        self, store: dist.TCPStore, *, rank: int, labels: Sequence[str], timeout_s: float, hooks: TransportHooks
    ) -> None:
        self.rank, self.labels, self.timeout_s = rank, list(labels), timeout_s
        self.mailbox = Mailbox(store, rank)
        self.world = len(self.labels)
        self.others = range(1, self.world) if rank == 0 else range(1)
        self._hooks = weakref.ref(hooks)
        self._closed_because: str | None = None
        self._n_rendezvous = 0
        self.begin_update()

    def begin_update(self) -> None:
        """Set the deadline of all following waits to ``timeout_s`` from now."""
        self.deadline = time.monotonic() + self.timeout_s

    def time_left(self) -> timedelta:
        """Return the time until the deadline, at least 1 ms: torch replaces a timeout of 0 by its default."""
        return timedelta(seconds=max(0.001, self.deadline - time.monotonic()))

    def label(self, rank: int) -> str:
        """Return the name of a rank in error messages."""
        return f"{self.labels[rank]} (transport rank {rank} of {self.world})"

    # Messages.

    def rendezvous(self, phase: str, text: str = "") -> dict[int, str]:
        """Wait until all ranks have called this method.

        Args:
            phase: Phase of the update, for error messages.
            text: Message to the others. Rank 0 publishes its own after it has collected all others.

        Returns:
            Messages by rank: on rank 0 the messages of all other ranks, elsewhere the message of rank 0.

        Raises:
            WeightSyncError: A rank reported a failure, or the group is closed.
            DeadlineError: A rank did not reach the rendezvous before the deadline.
        """
        self.check_open()
        self._n_rendezvous += 1
        topic = self._n_rendezvous
        if self.rank != 0:
            self.mailbox.publish(topic, text)
        collected = self.collect(topic, phase)
        if self.rank == 0:
            self.mailbox.publish(topic, text)
        # Every rank has read this message: no rank reaches rendezvous m + 2 before all ranks have left rendezvous m.
        self.mailbox.retract(topic - 2)
        return collected

    def collect(self, topic: Topic, phase: str) -> dict[int, str]:
        """Wait for the messages of ``topic`` from ``others``, and return them by rank.

        Raises:
            WeightSyncError: A rank reported a failure.
            DeadlineError: A message did not arrive before the deadline.
        """
        keys = {rank: message_key(topic, rank) for rank in self.others}
        store = self.mailbox.store
        try:
            if self.rank == 0:
                store.set(AWAITED_KEY, " ".join(keys.values()))
                self.check_interrupted(phase)
            store.set_timeout(self.time_left())
            values = store.multi_get(list(keys.values()))
        except dist.DistNetworkError as error:
            self.fail(phase, self.lost_store_error(phase, one_line(error)))
        except dist.DistError as error:
            silent = [rank for rank, key in keys.items() if not self.mailbox.has(key)]
            self.fail(phase, error, silent=silent or self.others)
        collected = {rank: value.decode() for rank, value in zip(keys, values, strict=True)}
        self._check_failed(phase, collected)
        return collected

    def has_arrived(self, rank: int) -> bool:
        """Return True if a rank has reached the next rendezvous."""
        return self.mailbox.has(message_key(self._n_rendezvous + 1, rank))

    def check_reports(self, phase: str) -> None:
        """Raise :class:`WeightSyncError` if a rank of ``others`` has reported a failure at the next rendezvous."""
        topic = self._n_rendezvous + 1
        messages = {rank: self.mailbox.read(message_key(topic, rank)) or "" for rank in self.others}
        self._check_failed(phase, messages)

    # Failures.

    def _check_failed(self, phase: str, messages: dict[int, str]) -> None:
        """Raise :class:`WeightSyncError` if a message reports a failure of its rank."""
        if failed := {rank: text for rank, text in messages.items() if text.startswith(FAILED_PREFIX)}:
            self.check_interrupted(phase)
            what, reported_by = self._describe_failures(failed), tuple(self.labels[rank] for rank in failed)
            self.fail(phase, WeightSyncError(what, phase=_in_transport(phase), reported_by=reported_by))

    def lost_store_error(self, phase: str, reason: str) -> WeightSyncError:
        """Return the error for the loss of the store, which rank 0 holds."""
        return WeightSyncError(
            f"{self.label(self.rank)} has lost {self.label(0)}, whose process holds the store ({reason})",
            phase=_in_transport(phase),
            remedy=f"look at the log of {self.labels[0]}",
        )

    def interrupt(self, reason: str) -> None:
        """Interrupt all ranks; see :func:`recipe_gkd.weight_sync.store.interrupt`. Safe while another thread waits."""
        interrupt(self.mailbox.store.host, self.mailbox.store.port, f"{self.label(self.rank)} reported: {reason}")

    def check_interrupted(self, phase: str) -> None:
        """Raise :class:`WeightSyncError` if a driver or a rank has interrupted the update."""
        if (reason := self.mailbox.read(INTERRUPTED_KEY)) is not None:
            self.fail(phase, WeightSyncError(reason, phase=_in_transport(phase)))

    def check_open(self) -> None:
        """Raise :class:`WeightSyncError` if the group is closed."""
        if self._closed_because is not None:
            what = f"this weight transport is closed ({self._closed_because})"
            raise TransportClosed(what, remedy="connect a new one")

    def fail(self, phase: str, error: BaseException, *, silent: Sequence[int] = ()) -> NoReturn:
        """Close the group and raise an error that names the cause. The other ranks receive it at their next wait.

        Args:
            phase: Phase of the update.
            error: Cause. A :class:`GkdError` is raised as it is.
            silent: Ranks that are at fault if the deadline has passed.

        Raises:
            DeadlineError: The deadline has passed, and ``silent`` is not empty.
            WeightSyncError: Any other cause.
        """
        others = self._reports()
        reports = f"; {others}" if others else ""
        own, place = self.label(self.rank), _in_transport(phase)
        is_late = time.monotonic() > self.deadline - _LATE_FRACTION * self.timeout_s
        if isinstance(error, GkdError):
            failure: GkdError = error
        elif silent and is_late:
            failure = DeadlineError(
                f"{', '.join(self.label(rank) for rank in silent)} did not answer {own} within {self.timeout_s:g} s "
                f"(actor_rollout_ref.nccl_timeout){reports}",
                phase=place,
                missing=tuple(self.labels[rank] for rank in silent),
                waited_s=self.timeout_s,
                remedy="look at the log of the rank that did not answer, or raise that key if the model needs longer",
            )
        else:
            failure = WeightSyncError(f"{one_line(error)}{reports}", phase=place, worker=own)
        self.abandon(str(failure))
        if failure is error:
            raise failure
        raise failure from error

    def abandon(self, reason: str) -> None:
        """Close the group and report ``reason`` to all ranks that wait for a message of this rank."""
        if self._closed_because is not None:
            return
        self.close(reason)
        with contextlib.suppress(dist.DistError):  # without the store's process no rank could read the report
            for topic in self._awaited_topics():
                self.mailbox.publish(topic, FAILED_PREFIX + reason[:MAX_REASON_CHARS])

    def close(self, reason: str) -> None:
        """Close the group. Later calls keep the first reason."""
        if self._closed_because is None:
            self._closed_because = reason
        if (hooks := self._hooks()) is not None:
            hooks.release()

    def _awaited_topics(self) -> list[Topic]:
        """Return the topics for which other ranks wait, or may soon wait."""
        hooks = self._hooks()
        return [self._n_rendezvous, self._n_rendezvous + 1, *(hooks.bucket_topics() if hooks is not None else ())]

    def _reports(self) -> str:
        """Return the failures that other ranks have reported so far."""
        found: dict[int, str] = {}
        for rank in range(self.world):
            for topic in self._awaited_topics():
                if rank != self.rank and (text := self.mailbox.read(message_key(topic, rank))) is not None:
                    found[rank] = text
        return self._describe_failures({rank: text for rank, text in found.items() if text.startswith(FAILED_PREFIX)})

    def _describe_failures(self, messages: dict[int, str]) -> str:
        reasons = {rank: text.removeprefix(FAILED_PREFIX) for rank, text in messages.items()}
        return "; ".join(f"{self.label(rank)} reported: {text}" for rank, text in reasons.items() if text)


def _in_transport(phase: str) -> str:
    return f"weight transport, {phase}"
