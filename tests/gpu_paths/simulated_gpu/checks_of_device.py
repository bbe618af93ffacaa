"""Properties of the simulated GPU, and of copies of the project on it. ``../test_simulated_gpu.py`` runs the tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipe_gkd.actor.checkpoint.host_copy import PinnedCopy
from recipe_gkd.weight_sync.bucket_plan import TensorMeta, pack, plan_buckets, unpack
from recipe_gkd.weight_sync.ipc import IpcTransport
from recipe_gkd.weight_sync.shared_memory import SharedMapping
from tests.gpu_paths.simulated_gpu import cuda_module

GPU = torch.device("cuda", 0)


def ones(size: int = 4) -> Tensor:
    return torch.ones(size, device=GPU)


class TestDevices:
    def test_tensor_of_the_host_is_refused(self) -> None:
        for operation in (torch.add, torch.dot, torch.minimum):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                operation(ones(), torch.ones(4))
        assert (ones() + torch.tensor(1.0)).device == GPU  # CUDA accepts numbers

    def test_operators_and_gradients_equal_those_of_the_host(self) -> None:
        torch.manual_seed(0)
        results = []
        weights = torch.randn(6, 5), torch.randn(5, 7)
        for device in ("cpu", "cuda"):
            a, b = (each.to(device, copy=True).requires_grad_() for each in weights)
            output = (a @ b).softmax(-1)[:, 2:5].square()
            rows = output[output.sum(-1) > 0.1]
            rows.sum().backward()
            results.append((rows, a.grad, b.grad))
        for one, other in zip(*results, strict=True):
            assert one is not None and other is not None and other.device == GPU
            torch.testing.assert_close(other.cpu(), one, rtol=0, atol=0)


class TestStreams:
    def test_copy_to_the_host_is_late(self) -> None:
        for host in (torch.empty(4), torch.empty(4, pin_memory=True)):
            host.copy_(ones(), non_blocking=True)
            assert host.tolist() == [0] * 4
            torch.cuda.current_stream().synchronize()
            assert host.tolist() == [1] * 4

    def test_wait_for_another_stream_does_not_suffice(self) -> None:
        host, stream = torch.empty(4), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            host.copy_(ones(), non_blocking=True)
        torch.cuda.current_stream().synchronize()
        assert host.tolist() == [0] * 4
        stream.synchronize()
        assert host.tolist() == [1] * 4

    def test_copy_from_pinned_memory_reads_late(self) -> None:
        host = torch.ones(4, pin_memory=True)
        device = host.to(GPU, non_blocking=True)
        host.zero_()
        assert device.tolist() == [0] * 4
        pageable = torch.ones(4)
        device = pageable.to(GPU, non_blocking=True)
        pageable.zero_()
        assert device.tolist() == [1] * 4

    def test_waits_of_the_host_are_refused_on_request(self) -> None:
        values, host = ones(), torch.empty(4, pin_memory=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for wait in (values.sum().item, values.nonzero, lambda: values[values > 0], values.cpu, values.tolist):
                with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                    wait()
            host.copy_(values, non_blocking=True)
            values.index_select(0, torch.zeros(2, dtype=torch.int64, pin_memory=True).to(GPU, non_blocking=True))
        finally:
            torch.cuda.set_sync_debug_mode("default")


class TestMemory:
    def test_allocator_counts_and_has_a_limit(self) -> None:
        gpu, before = cuda_module.Device(), torch.cuda.memory_allocated()
        block = torch.empty(1 << 20, dtype=torch.uint8, device=GPU)
        assert torch.cuda.memory_allocated() == before + (1 << 20)
        gpu.limit(before + (3 << 19))
        try:
            with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                torch.empty(1 << 20, dtype=torch.uint8, device=GPU)
        finally:
            gpu.limit(1 << 62)
        torch.cuda.reset_peak_memory_stats()
        del block
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == before + (1 << 20)


class Calls(TorchDispatchMode):
    """Records the order of copies between tensors, of waits for the current stream, and of messages to other ranks."""

    rank, others, mailbox = 0, (1,), property(lambda self: self)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        stream = SimpleNamespace(synchronize=lambda: self.names.append("wait"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("aten.copy_"):
            self.names.append("copy")
        return func(*args, **(kwargs or {}))

    def publish(self, topic: str, text: str) -> None:
        self.names.append("publish")
        self.published = text

    def collect(self, topic: str, phase: str) -> dict[int, str]:
        return {0: self.published}

    def retract(self, topic: str) -> None: ...


class TestIpc:
    def test_sender_waits_before_it_publishes_and_receiver_before_it_confirms(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls, source_U = Calls(monkeypatch), torch.arange(6, dtype=torch.uint8, device=GPU)
        with calls:
            transport_on(0, calls).broadcast(source_U[2:5])
            assert calls.names == ["wait", "publish"]
            calls.names.clear()
            receiver, buffer_U = transport_on(1, calls), torch.zeros(3, dtype=torch.uint8, device=GPU)
            work = receiver.broadcast(buffer_U)
            assert calls.names == []
            receiver.finish(work, "update")
            assert calls.names == ["copy", "wait", "publish"]
        assert buffer_U.tolist() == [2, 3, 4]


def transport_on(rank: int, calls: Any) -> IpcTransport:
    """Return an open transport of ranks on one GPU, without a connection."""
    transport = IpcTransport.__new__(IpcTransport)
    transport.rank, transport.device, transport.peers, transport._one_gpu = rank, GPU, calls, True
    return transport


class TestCopiesOfTheProject:
    """Each of these fails without the wait, or the order, that the code of the project has."""

    def test_offloaded_memory_is_complete_before_the_device_memory_is_freed(self) -> None:
        state, copy = torch.arange(1000.0, device=GPU), PinnedCopy(GPU)
        storage = state.untyped_storage()
        copy.write([(storage, storage.nbytes())])
        assert all(block.is_pinned() for block in copy.blocks)
        assert copy.blocks[0].view(torch.float32).tolist() == list(range(1000))
        storage.resize_(0)
        storage.resize_(4000)
        copy.read([(storage, 4000)])
        assert state.tolist() == list(range(1000))  # a later kernel of the stream sees the copy

    def test_packed_bucket_on_the_host_is_complete(self) -> None:
        meta: list[TensorMeta] = [("a", (3, 5), "bfloat16"), ("b", (7,), "float32")]
        (bucket,) = plan_buckets(meta, 1 << 20)
        buffer_U = torch.zeros(bucket.n_bytes, dtype=torch.uint8)
        pairs = [(name, torch.full(shape, 3.0, dtype=getattr(torch, dtype), device=GPU)) for name, shape, dtype in meta]
        pack(bucket, iter(pairs), buffer_U)
        assert {name: tensor.unique().tolist() for name, tensor in unpack(bucket, buffer_U)} == {"a": [3.0], "b": [3.0]}

    def test_shared_mapping_is_pinned_until_it_is_unmapped(self, tmp_path: Path) -> None:
        with (tmp_path / "segment").open("w+b") as file:
            file.truncate(4096)
            memory_U = SharedMapping(file.fileno(), 4096).tensor(GPU)
            on_host_U = SharedMapping(file.fileno(), 4096).tensor(torch.device("cpu"))
        part_U, address = memory_U[100:200], memory_U.data_ptr()
        assert memory_U.is_pinned() and not on_host_U.is_pinned()
        del memory_U
        assert part_U.is_pinned()
        del part_U
        assert not cuda_module.Device().is_pinned(address)
