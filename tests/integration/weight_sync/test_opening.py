"""Tests of the phase that opens the communicator, with real stores and gloo groups in threads."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from recipe_gkd.errors import DeadlineError, WeightSyncError
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.opening import OPEN_PHASE
from recipe_gkd.weight_sync.private_group import PrivateGroup
from recipe_gkd.weight_sync.store import interrupt, join_store, open_store
from recipe_gkd.weight_sync.transport import Transport
from tests._support.errors import raises
from tests._support.waiting import FOREVER_S, PATIENCE_S
from tests.integration.weight_sync.transport_pairs import CPU, LABELS, connect_all, spawn

TIMEOUT_S = 1.5
PHASE = f"weight transport, {OPEN_PHASE}"


class BlockedTransport(CollectiveTransport):
    """A rank that blocks while it connects, as in ``ncclCommInitRank``, and ignores the order to stop."""

    def _connect(self, stop: threading.Event) -> Any:
        threading.Event().wait()


class DeadTransport(CollectiveTransport):
    """A rank that reaches the rendezvous and then does nothing any more."""

    def _open(self) -> None:
        threading.Event().wait()


class BrokenTransport(CollectiveTransport):
    """A rank that cannot connect."""

    def _connect(self, stop: threading.Event) -> Any:
        raise RuntimeError("no route to host")


def connect(*kinds: type[Transport], timeout_s: float = TIMEOUT_S) -> tuple[int, list[Future[Any]]]:
    """Connect ranks of these classes. Return the port of the store and the futures of the ranks."""
    store = open_store("127.0.0.1", timeout_s)
    labels = LABELS[: len(kinds)]

    def start(rank: int) -> Future[Any]:
        def open_rank() -> Transport:
            own = store if rank == 0 else join_store("127.0.0.1", store.port, timeout_s)
            return kinds[rank](own, rank=rank, labels=labels, device=CPU, timeout_s=timeout_s)

        return spawn(open_rank)

    return store.port, [start(rank) for rank in range(len(kinds))]


def test_open_dead_rank_is_named_at_deadline() -> None:
    _, (sender, _, alive) = connect(CollectiveTransport, DeadTransport, CollectiveTransport)
    with raises(DeadlineError, phase=PHASE, missing=("rollout worker 0",), waited_s=TIMEOUT_S):
        sender.result(PATIENCE_S)
    with raises(WeightSyncError, reported_by=("actor worker 0",)):
        alive.result(PATIENCE_S)


def test_open_blocked_but_alive_ranks_raise_at_deadline_with_advice() -> None:
    _, ranks = connect(BlockedTransport, BlockedTransport)
    with raises(DeadlineError, phase=PHASE, missing=(), waited_s=TIMEOUT_S):
        ranks[0].result(PATIENCE_S)


def test_open_blocked_rank_is_interrupted() -> None:
    port, ranks = connect(BlockedTransport, BlockedTransport, timeout_s=FOREVER_S)
    interrupt("127.0.0.1", port, "rollout worker 0 died")
    for rank in ranks:
        with pytest.raises(WeightSyncError) as caught:
            rank.result(PATIENCE_S)
        assert "rollout worker 0 died" in caught.value.what


def test_open_failure_of_one_rank_reaches_sender() -> None:
    _, (sender, broken) = connect(CollectiveTransport, BrokenTransport)
    with raises(WeightSyncError, phase=PHASE, worker="rollout worker 0 (transport rank 1 of 2)"):
        broken.result(PATIENCE_S)
    with raises(WeightSyncError, reported_by=("rollout worker 0",)):
        sender.result(PATIENCE_S)


def test_open_creates_connections_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[PrivateGroup] = []
    probe = PrivateGroup.probe

    def record(group: PrivateGroup) -> None:
        probed.append(group)
        probe(group)

    monkeypatch.setattr(PrivateGroup, "probe", record)
    ranks = connect_all(2, 20)
    assert len(probed) == 3
    keys = ranks[0].peers.mailbox.store.list_keys()
    assert sum("group/" in key for key in keys) >= 3  # the addresses of all ranks
    assert not any("opening/" in key for key in keys)
