"""Death of the receiver of a weight sync over NCCL between two GPUs, and the reuse of bucket memory on one GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from recipe_gkd.commands.gpu_smoke.peer_process import running_peer
from recipe_gkd.errors import GkdError
from recipe_gkd.weight_sync.bucket_plan import BucketPlan, TensorMeta
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights
from recipe_gkd.weight_sync.sender import send_weights
from recipe_gkd.weight_sync.store import join_store, open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LABELS = ["actor worker 0", "rollout worker 0"]
START_S, TIMEOUT_S = 90.0, 20.0
META: list[TensorMeta] = [(f"layer.{i}", (512, 1024), "bfloat16") for i in range(16)]
BUCKET_BYTES = 2 << 20
OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""With sockets NCCL detects the death of a peer, as it does between nodes."""


def device_of(rank: int) -> torch.device:
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def make_weights(version: int, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i, (name, shape, _) in enumerate(META):
        yield name, torch.full(shape, version + i / 16, dtype=torch.bfloat16, device=device_of(rank))


def connect(store: Any, rank: int) -> CollectiveTransport:
    transport = CollectiveTransport(store, rank=rank, labels=LABELS, device=device_of(rank), timeout_s=START_S)
    transport.peers.timeout_s = TIMEOUT_S
    return transport


def receive(connection: Connection, port: int, version: int, dies: bool) -> None:
    """Receive an update in a separate process. The process may die in the fourth bucket."""
    transport = connect(join_store("127.0.0.1", port, START_S), 1)
    taken: NamedTensors = []

    def take(tensors: NamedTensors) -> None:
        taken.extend(tensors)
        if dies and len(taken) >= 4:
            os._exit(1)

    receive_weights(transport, version, META, BUCKET_BYTES, take)
    expected = dict(make_weights(version, 1))
    connection.send(all(torch.equal(tensor, expected[name]) for name, tensor in taken) and len(taken) == len(META))


def send(version: int, receiver_dies: bool) -> tuple[str, bool | None]:
    """Send an update to a new receiver. Return the sender's error and the receiver's result."""
    store = open_store("127.0.0.1", START_S)
    with running_peer(receive, store.port, version, receiver_dies, timeout_s=START_S) as peer:
        transport = connect(store, 0)
        try:
            send_weights(transport, version, META, make_weights(version, 0), BUCKET_BYTES)
        except GkdError as error:
            return str(error), None
        finally:
            transport.close()
        return "", peer.receive()


def run_sender(connection: Connection, environment: dict[str, str]) -> None:
    """Send to a receiver that dies, and then to another one, from a process that NCCL may end."""
    os.environ.update(environment)
    first = send(1, receiver_dies=True)
    time.sleep(5)  # NCCL's watchdog would end this process meanwhile
    connection.send((first, send(2, receiver_dies=False)))


@two_gpus
@pytest.mark.parametrize("environment", [{}, OVER_SOCKETS], ids=["default", "sockets"])
def test_dead_receiver_is_an_error_and_the_sender_continues(environment: dict[str, str]) -> None:
    with running_peer(run_sender, environment, timeout_s=2 * START_S + 2 * TIMEOUT_S) as peer:
        (error, _), second = peer.receive()
    assert "weights v1" in error and second == ("", True)


class SlowReader:
    """Transport on one GPU whose buckets have the number of the bucket in each byte."""

    def __init__(self) -> None:
        self.device, self.peers, self._n = torch.device("cuda", 0), self, 0

    def begin_update(self) -> None:
        pass

    def rendezvous(self, phase: str, text: str = "") -> dict[int, str]:
        return {0: text}

    def fail(self, phase: str, error: BaseException) -> None:
        raise error

    def plan(self, meta: list[TensorMeta], bucket_bytes: int) -> BucketPlan:
        return BucketPlan(meta, bucket_bytes)

    def receive_buffer(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def broadcast(self, buffer_U: torch.Tensor) -> torch.Tensor:
        self._n += 1
        return buffer_U.fill_(self._n)

    def finish(self, work: torch.Tensor, phase: str) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def test_bucket_memory_is_not_reused_before_another_stream_has_read_it() -> None:
    transport: Any = SlowReader()
    meta: list[TensorMeta] = [(f"layer.{i}", (1 << 20,), "uint8") for i in range(8)]
    copies: list[torch.Tensor] = []

    def load(tensors: NamedTensors) -> None:
        torch.cuda._sleep(50_000_000)  # cycles of the GPU: the reading stream falls behind
        copies.extend(tensor.clone() for _, tensor in tensors)

    stream = torch.cuda.Stream(transport.device)
    with torch.cuda.stream(stream):
        receive_weights(transport, 1, meta, 1 << 20, load)
        stream.synchronize()
    assert [(int(copy.min()), int(copy.max())) for copy in copies] == [(i + 1, i + 1) for i in range(8)]
