"""Tests of the receiving side with a fake transport, for properties of CUDA streams."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch

from recipe_gkd.weight_sync.bucket_plan import BucketPlan, TensorMeta
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights

META: list[TensorMeta] = [(f"layer.{i}", (4, 4), "float32") for i in range(3)]
BUCKET_BYTES = 64


class CudaLikeTensor(torch.Tensor):
    """A CPU tensor that claims to be on a GPU, and records the streams that use its memory."""

    is_cuda = True
    recorded: ClassVar[list[tuple[int, Any]]] = []

    def record_stream(self, stream: Any) -> None:
        CudaLikeTensor.recorded.append((self.data_ptr(), stream))


class FakePeers:
    """Peers that answer each rendezvous with the receiver's own message."""

    def begin_update(self) -> None:
        pass

    def rendezvous(self, phase: str, text: str = "") -> dict[int, str]:
        return {0: text}

    def fail(self, phase: str, error: BaseException) -> None:
        raise error


class FakeTransport:
    """Transport whose buckets arrive at once, in memory that claims to be on a GPU."""

    device, peers = torch.device("cpu"), FakePeers()

    def __init__(self, kind: type[torch.Tensor]) -> None:
        self._kind = kind
        self.allocated: list[int] = []

    def plan(self, meta: list[TensorMeta], bucket_bytes: int) -> BucketPlan:
        return BucketPlan(meta, bucket_bytes)

    def receive_buffer(self, n_bytes: int) -> torch.Tensor:
        buffer_U = torch.zeros(n_bytes, dtype=torch.uint8)
        self.allocated.append(buffer_U.data_ptr())
        return buffer_U.as_subclass(self._kind)

    def broadcast(self, buffer_U: torch.Tensor) -> None:
        pass

    def finish(self, work: None, phase: str) -> None:
        pass


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each thread its own current stream, with the name of the thread."""
    CudaLikeTensor.recorded = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: threading.current_thread().name)


def test_receive_reserves_each_bucket_for_the_stream_that_loads_it() -> None:
    transport: Any = FakeTransport(CudaLikeTensor)
    kept: NamedTensors = []  # keeps the memory, so that the addresses differ
    seen: list[int] = []

    def load(tensors: NamedTensors) -> None:
        kept.extend(tensors)
        seen.append(len(CudaLikeTensor.recorded))

    receive_weights(transport, 1, META, BUCKET_BYTES, load)
    consumer = threading.current_thread().name
    assert CudaLikeTensor.recorded == [(address, consumer) for address in transport.allocated]
    assert seen == [1, 2, 3]  # reserved before it is loaded


def test_receive_host_memory_uses_no_stream() -> None:
    transport: Any = FakeTransport(torch.Tensor)
    receive_weights(transport, 1, META, BUCKET_BYTES, lambda _: None)
    assert not CudaLikeTensor.recorded
