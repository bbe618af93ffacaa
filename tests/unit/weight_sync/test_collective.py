"""Tests of waits for transfers of NCCL, with a fake of its work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipe_gkd.errors import DeadlineError, WeightSyncError
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.peers import PeerGroup
from tests._support.errors import raises


@pytest.fixture
def finish() -> Callable[[Any], None]:
    """Function that waits for a work, with a deadline of 0.3 s."""
    transport = object.__new__(CollectiveTransport)  # without a connection to other ranks
    transport.device, transport._packing_buffers = torch.device("cuda", 0), []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    transport.peers = PeerGroup(store, rank=0, labels=["actor", "rollout"], timeout_s=0.3, hooks=transport)
    return lambda work: transport.finish(work, "bucket 1")


def raise_remote_error() -> None:
    raise RuntimeError("ncclRemoteError")


def test_finish_raises_error_of_the_transfer(finish: Callable[[Any], None]) -> None:
    with raises(WeightSyncError, phase="weight transport, bucket 1", worker="actor (transport rank 0 of 2)") as caught:
        finish(SimpleNamespace(is_completed=lambda: True, wait=raise_remote_error))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_finish_ends_at_the_deadline_although_abort_of_the_communicator_blocks(finish: Callable[[Any], None]) -> None:
    blocked = threading.Event()
    with raises(DeadlineError, phase="weight transport, bucket 1", missing=("rollout",), waited_s=0.3):
        finish(SimpleNamespace(is_completed=lambda: True, wait=lambda: blocked.wait(600)))
    blocked.set()


def test_finish_ends_at_the_deadline_of_a_transfer_that_never_completes(finish: Callable[[Any], None]) -> None:
    with raises(DeadlineError, missing=("rollout",)):
        finish(SimpleNamespace(is_completed=lambda: False))
