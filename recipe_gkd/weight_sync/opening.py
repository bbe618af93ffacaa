"""Opening of a communicator between all ranks. It may block in C++, so it runs in a thread with a deadline.

While a rank waits for its thread, it publishes a heartbeat. At the deadline all ranks wait for each other inside the
communicator; only the heartbeats distinguish a rank that is dead from ranks that wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from recipe_gkd.errors import DeadlineError
from recipe_gkd.weight_sync.mailbox import message_key
from recipe_gkd.weight_sync.peers import PeerGroup
from recipe_gkd.weight_sync.store import one_line

T = TypeVar("T")

OPEN_PHASE = "open communicator"
_TOPIC = "opening"
_HEARTBEAT_INTERVAL_S = 0.2
_MAX_SILENCE_S = 1.0
"""Age at which the last heartbeat of a rank counts as missing."""
_REPORT_MARGIN_S = 1.0
"""Time that other ranks wait after the deadline for the report of rank 0, which alone collects all heartbeats."""


def open_on_all_ranks(peers: PeerGroup, build: Callable[[threading.Event], T], discard: Callable[[T], None]) -> T:
    """Run ``build`` on all ranks at the same time, and return its result when all ranks have finished.

    Args:
        peers: Ranks; all call this function at the same time.
        build: Function that connects this rank. It should end soon after its argument is set. If it does not, its
            thread is abandoned.
        discard: Called with the result of ``build`` if the call has failed meanwhile.

    Raises:
        DeadlineError: A rank did not open the communicator before the deadline. The message names silent ranks.
        WeightSyncError: ``build`` failed on a rank, or the update was interrupted.
    """
    thread = _BuildThread(build, discard)
    thread.start()
    heartbeats = _Heartbeats(peers)
    try:
        while not thread.done.wait(_HEARTBEAT_INTERVAL_S):
            peers.check_interrupted(OPEN_PHASE)
            peers.check_reports(OPEN_PHASE)
            heartbeats.exchange()
            if time.monotonic() > peers.deadline + (_REPORT_MARGIN_S if peers.rank else 0):
                heartbeats.fail()
        if thread.error is not None:
            peers.fail(OPEN_PHASE, thread.error)
        peers.rendezvous(f"{OPEN_PHASE}, confirm")
        heartbeats.retract()
        return thread.take_result()
    finally:
        thread.abandon()


class _BuildThread(threading.Thread, Generic[T]):
    """Thread that runs ``build``.

    Attributes:
        done: Set when ``build`` has ended.
        error: Exception of ``build``.
    """

    def __init__(self, build: Callable[[threading.Event], T], discard: Callable[[T], None]) -> None:
        super().__init__(name="open-weight-transport", daemon=True)
        self._build, self._discard = build, discard
        self._stop_building = threading.Event()
        self._lock = threading.Lock()
        self._result: list[T] = []  # at most one
        self.done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run ``build``, and discard its result if the thread was abandoned."""
        try:
            result = self._build(self._stop_building)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            self.error = error
        else:
            with self._lock:
                self._result.append(result)
            del result
            if self._stop_building.is_set():
                self.abandon()
        self.done.set()

    def take_result(self) -> T:
        """Return the result of ``build``, once."""
        with self._lock:
            return self._result.pop()

    def abandon(self) -> None:
        """Stop ``build``, and discard its result if it was not taken. Idempotent."""
        self._stop_building.set()
        with self._lock:
            results, self._result = self._result, []
        for result in results:
            self._discard(result)


class _Heartbeats:
    """Signs of life of the ranks from which a rank collects messages."""

    def __init__(self, peers: PeerGroup) -> None:
        self._peers = peers
        self._n_sent = 0
        self._last: dict[int, tuple[Any, float]] = {rank: (None, time.monotonic()) for rank in peers.others}

    def exchange(self) -> None:
        """Publish a heartbeat, and read the heartbeats of the other ranks."""
        peers, self._n_sent = self._peers, self._n_sent + 1
        try:
            peers.mailbox.publish(_TOPIC, str(self._n_sent))
        except dist.DistNetworkError as error:
            peers.fail(OPEN_PHASE, peers.lost_store_error(OPEN_PHASE, one_line(error)))
        for rank, (value, _) in self._last.items():
            current = peers.mailbox.read(message_key(_TOPIC, rank))
            if current != value:
                self._last[rank] = current, time.monotonic()

    def fail(self) -> None:
        """Raise the error of the deadline."""
        peers, now = self._peers, time.monotonic()
        limit_s = min(_MAX_SILENCE_S, 0.5 * peers.timeout_s)
        silent = [
            rank for rank, (_, seen) in self._last.items() if now - seen > limit_s and not peers.has_arrived(rank)
        ]
        if silent:
            peers.fail(OPEN_PHASE, TimeoutError("timed out"), silent=silent)
        alive = "all of them are" if peers.rank == 0 else f"{peers.label(0)} is"
        what = (
            f"the {peers.world} ranks did not connect within {peers.timeout_s:g} s (actor_rollout_ref.nccl_timeout), "
            f"although {alive} alive"
        )
        remedy = (
            "check that the nodes reach each other over the interface that is used (NCCL_SOCKET_IFNAME, "
            "GLOO_SOCKET_IFNAME, NCCL_IB_HCA), set NCCL_DEBUG=INFO for NCCL's own messages, or raise that key"
        )
        phase = f"weight transport, {OPEN_PHASE}"
        peers.fail(OPEN_PHASE, DeadlineError(what, phase=phase, waited_s=peers.timeout_s, remedy=remedy))

    def retract(self) -> None:
        """Remove the heartbeat of this rank."""
        self._peers.mailbox.retract(_TOPIC)
