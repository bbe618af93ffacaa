"""Tests of one update between real ranks of a transport: complete transfers, and every kind of failure."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipe_gkd.errors import DeadlineError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.host_memory import BufferPool
from recipe_gkd.weight_sync.ipc import IpcTransport
from recipe_gkd.weight_sync.peers import TransportClosed
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights
from recipe_gkd.weight_sync.sender import send_weights
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.store import interrupt, join_store, open_store
from recipe_gkd.weight_sync.transport import Transport
from tests._support.errors import culprits, raises
from tests._support.waiting import PATIENCE_S
from tests.integration.weight_sync.transport_pairs import (
    CPU,
    KINDS,
    LABELS,
    META,
    connect_all,
    make_weights,
    spawn,
    stalling_export,
)

TRANSPORT = "weight transport"
BUCKET_BYTES = 3000  # a bucket holds one tensor of 1600 bytes
both_kinds = pytest.mark.parametrize("kind", KINDS)


def ignore(_: NamedTensors) -> None:
    pass


_HOLD_STORE = """
import torch.distributed as dist
from recipe_gkd.weight_sync.peers import TransportClosed
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


class SlowStore:
    """A store that needs a timeout of 0.1 s or more."""

    def __init__(self, store: Any) -> None:
        self._store, self._timeout_s = store, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()

    def get(self, key: str) -> Any:
        if self._timeout_s < 0.1:
            raise dist.DistStoreError("wait timeout")
        return self._store.get(key)


def _die_in_second_bucket(port: int, kind: type[Transport]) -> None:
    transport = kind(
        join_store("127.0.0.1", port, PATIENCE_S), rank=1, labels=LABELS[:2], device=CPU, timeout_s=PATIENCE_S
    )
    seen: list[Any] = []

    def take(tensors: NamedTensors) -> None:
        seen.append(tensors)
        if len(seen) == 2:
            os._exit(1)

    receive_weights(transport, 3, META, BUCKET_BYTES, take)


class RecordingTransport(CollectiveTransport):
    """Records the packing buffers that were requested, and the addresses that were sent."""

    def packing_buffers(self, n: int, n_bytes: int) -> list[torch.Tensor]:
        self.requested = n, n_bytes
        return super().packing_buffers(n, n_bytes)

    def broadcast(self, buffer_U: torch.Tensor) -> Any:
        self.sent = [*getattr(self, "sent", []), buffer_U.data_ptr()]
        return super().broadcast(buffer_U)


def open_files() -> list[str]:
    """Return the targets of all file descriptors of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


class FlippingTransport(CollectiveTransport):
    """Flips a bit of every received bucket."""

    def broadcast(self, buffer_U: torch.Tensor) -> Any:
        return super().broadcast(buffer_U), buffer_U

    def finish(self, work: Any, phase: str) -> None:
        super().finish(work[0], phase)
        work[1][5] ^= 1


class CountingSource:
    def __init__(self) -> None:
        self.n_exported = 0

    def weights_meta(self) -> Any:
        return META

    def export_weights(self) -> Any:
        for item in make_weights().items():
            yield item
            self.n_exported += 1


class TestTransfer:
    @both_kinds
    @pytest.mark.parametrize("n_receivers", [1, 2, 3])
    def test_transfer_any_bucket_size_preserves_bits_and_order(self, n_receivers: int, kind: type[Transport]) -> None:
        sender, *receivers = connect_all(n_receivers, 20, kind)
        sums = set()
        for version, bucket_bytes in enumerate([1, 1601, 4999, 4999, 1 << 20]):
            sent = make_weights(seed=version)
            taken: list[NamedTensors] = [[] for _ in receivers]
            receiving = [
                spawn(lambda c=c, t=t, v=version, b=bucket_bytes: receive_weights(c, v, META, b, t.extend))  # type: ignore[misc]
                for c, t in zip(receivers, taken, strict=True)
            ]
            stats = send_weights(sender, version, META, sent.items(), bucket_bytes)
            results = [future.result(PATIENCE_S) for future in receiving]
            for received in taken:
                assert [name for name, _ in received] == list(sent)
                assert all(t.dtype == sent[name].dtype and torch.equal(t, sent[name]) for name, t in received)
            assert {result.checksum for result in results} == {stats.checksum}
            assert stats.n_bytes == sum(-(-t.nbytes // 16) * 16 for t in sent.values())
            sums.add(stats.checksum)
        assert len(sums) == 5

    @both_kinds
    def test_receive_continues_while_loading(self, kind: type[Transport]) -> None:
        sender, receiver = connect_all(1, 20, kind)
        loading, packed = threading.Event(), threading.Event()

        def export() -> Any:
            for i, item in enumerate(make_weights().items()):
                if i == 2:
                    # The first bucket is loading, the second has arrived, this is the third.
                    assert loading.wait(PATIENCE_S)
                    packed.set()
                yield item

        def take(_: NamedTensors) -> None:
            loading.set()
            assert packed.wait(PATIENCE_S)

        receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET_BYTES, take))
        send_weights(sender, 3, META, export(), BUCKET_BYTES)
        receiving.result(PATIENCE_S)

    @both_kinds
    def test_send_slow_receiver_gets_intact_buckets(self, kind: type[Transport]) -> None:
        sender, slow, fast = connect_all(2, 20, kind)
        sent = make_weights()
        taken: dict[str, list[Any]] = {"slow": [], "fast": []}

        def take(name: str, tensors: NamedTensors) -> None:
            before = [tensor.clone() for _, tensor in tensors]
            if name == "slow":
                time.sleep(0.05)  # long enough for the sender to pack all other buckets
            assert all(torch.equal(a, b) for a, (_, b) in zip(before, tensors, strict=True))
            taken[name] += tensors  # kept, so that their memory must not be reused

        for version in (1, 2):
            taken = {"slow": [], "fast": []}
            receiving = [
                spawn(lambda c=c, w=w, v=version: receive_weights(c, v, META, BUCKET_BYTES, lambda t: take(w, t)))  # type: ignore[misc]
                for c, w in ((slow, "slow"), (fast, "fast"))
            ]
            send_weights(sender, version, META, sent.items(), BUCKET_BYTES)
            for future in receiving:
                future.result(PATIENCE_S)
            for found in taken.values():
                assert all(torch.equal(tensor, sent[name]) for name, tensor in found) and len(found) == len(META)

    def test_send_in_place_needs_no_packing_buffer(self) -> None:
        shapes = [("embed", 4000), *((f"layer.{i}", 64) for i in range(8)), ("head", 4000), ("late", 64)]
        sent = {name: torch.rand(n) for name, n in shapes}
        sent["head"] = torch.rand(4001)[1:]  # not aligned
        meta: list[TensorMeta] = [(name, (n,), "float32") for name, n in shapes]
        sender, receiver = connect_all(1, 10, RecordingTransport, CollectiveTransport)
        taken: NamedTensors = []
        receiving = spawn(lambda: receive_weights(receiver, 1, meta, 1024, taken.extend))
        send_weights(sender, 1, meta, sent.items(), 1024)
        receiving.result(PATIENCE_S)
        assert sender.requested == (2, 1024)
        assert sent["embed"].data_ptr() in sender.sent and sent["head"].data_ptr() not in sender.sent
        assert [name for name, _ in taken] == list(sent) and all(
            torch.equal(tensor, sent[name]) for name, tensor in taken
        )

    def test_begin_different_plans_raises_before_transfer(self) -> None:
        sender, receiver = connect_all(1, 5)
        taken: NamedTensors = []
        receiving = spawn(lambda: receive_weights(receiver, 4, META, BUCKET_BYTES, taken.extend))
        with raises(WeightSyncError, phase="weights v3, begin"):
            send_weights(sender, 3, META, make_weights().items(), BUCKET_BYTES)
        with raises(WeightSyncError, phase="weights v4, begin"):
            receiving.result(PATIENCE_S)
        assert not taken

    def test_confirm_flipped_bit_raises_on_both_sides(self) -> None:
        sender, receiver = connect_all(1, 5, CollectiveTransport, FlippingTransport)
        receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET_BYTES, ignore))
        with raises(WeightSyncError, phase="weights v3, confirm"):
            send_weights(sender, 3, META, make_weights().items(), BUCKET_BYTES)
        with raises(WeightSyncError, phase="weights v3, confirm"):
            receiving.result(PATIENCE_S)


class TestSenderFailure:
    def test_receive_without_sender_loads_nothing(self) -> None:
        _, receiver = connect_all(1, 1.0)
        taken: NamedTensors = []
        with raises(DeadlineError, phase=f"{TRANSPORT}, weights v3, begin", missing=("actor worker 0",), waited_s=1.0):
            receive_weights(receiver, 3, META, BUCKET_BYTES, taken.extend)
        assert not taken

    @both_kinds
    def test_receive_stalled_sender_is_named(self, kind: type[Transport]) -> None:
        sender, receiver = connect_all(1, 1.5, kind)
        resume = threading.Event()
        sending = spawn(lambda: send_weights(sender, 3, META, stalling_export(3, resume), BUCKET_BYTES))
        with raises(DeadlineError, phase=f"{TRANSPORT}, weights v3, bucket 4 of 5", missing=("actor worker 0",)):
            receive_weights(receiver, 3, META, BUCKET_BYTES, ignore)
        with pytest.raises(TransportClosed):
            receive_weights(receiver, 4, META, BUCKET_BYTES, ignore)
        resume.set()
        with pytest.raises((WeightSyncError, DeadlineError)) as caught:
            sending.result(PATIENCE_S)
        assert "rollout worker 0" in culprits(caught.value)

    def test_send_export_raises_receivers_get_reason(self) -> None:
        sender, receiver = connect_all(1, 600)

        def export() -> Any:
            yield from list(make_weights().items())[:3]
            raise ZeroDivisionError("no such expert")

        receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET_BYTES, ignore))
        with raises(WeightSyncError, phase=f"{TRANSPORT}, weights v3, export") as caught:
            send_weights(sender, 3, META, export(), BUCKET_BYTES)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with raises(WeightSyncError, reported_by=("actor worker 0",)):
            receiving.result(PATIENCE_S)

    @pytest.mark.parametrize(
        ("change", "tensors"),
        [
            (lambda items: items[:-1], ("bias",)),
            (lambda items: [*items, ("extra", torch.zeros(1))], ("extra",)),
            (lambda items: items[::-1], ("bias", "layer.0.weight")),
            (lambda items: [*items[:-1], ("bias", torch.zeros(3))], ("bias",)),
        ],
    )
    def test_send_export_differs_from_meta_raises(self, change: Any, tensors: tuple[str, ...]) -> None:
        sender, receiver = connect_all(1, 5)
        receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET_BYTES, ignore))
        with raises(WeightSyncError, tensors=tensors):
            send_weights(sender, 3, META, change(list(make_weights().items())), BUCKET_BYTES)
        with raises(WeightSyncError, reported_by=("actor worker 0",)):
            receiving.result(PATIENCE_S)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_send_failure_drains_export_on_every_rank(self, rank: int) -> None:
        source = CountingSource()
        api = WeightSenderApi(source, rank=rank, device=CPU, timeout_s=1.0)
        if rank == 0:
            with pytest.raises(WeightSyncError):
                api.send(1, BUCKET_BYTES)
        else:
            assert api.send(1, BUCKET_BYTES) is None
        assert source.n_exported == len(META)


class TestReceiverFailure:
    @both_kinds
    def test_receive_load_raises_sender_gets_name_and_reason(self, kind: type[Transport]) -> None:
        sender, good, bad = connect_all(2, 5, kind)

        def refuse(_: NamedTensors) -> None:
            raise MemoryError("the device is full")

        receiving = [
            spawn(lambda: receive_weights(good, 3, META, BUCKET_BYTES, ignore)),
            spawn(lambda: receive_weights(bad, 3, META, BUCKET_BYTES, refuse)),
        ]
        with pytest.raises(WeightSyncError) as caught:
            send_weights(sender, 3, META, make_weights().items(), BUCKET_BYTES)
        assert "rollout worker 1" in caught.value.what  # reported by that rank, at a rendezvous or by an interruption
        with raises(WeightSyncError, phase=f"{TRANSPORT}, weights v3, load"):
            receiving[1].result(PATIENCE_S)
        with pytest.raises((WeightSyncError, DeadlineError)):
            receiving[0].result(PATIENCE_S)

    def test_send_absent_receiver_is_named(self) -> None:
        sender, first, _ = connect_all(2, 1.0)
        spawn(lambda: receive_weights(first, 3, META, BUCKET_BYTES, ignore))
        with raises(DeadlineError, phase=f"{TRANSPORT}, weights v3, begin", missing=("rollout worker 1",)):
            send_weights(sender, 3, META, make_weights().items(), BUCKET_BYTES)

    @both_kinds
    def test_send_dead_receiver_is_named(self, kind: type[Transport]) -> None:
        store = open_store("127.0.0.1", 20)
        process = multiprocessing.get_context("spawn").Process(target=_die_in_second_bucket, args=(store.port, kind))
        process.start()
        try:
            sender = kind(store, rank=0, labels=LABELS[:2], device=CPU, timeout_s=PATIENCE_S)
            sender.peers.timeout_s = 1.0
            with pytest.raises((DeadlineError, WeightSyncError)) as caught:
                send_weights(sender, 3, META, make_weights().items(), BUCKET_BYTES)
            assert caught.value.phase in {f"{TRANSPORT}, weights v3, bucket {i} of 5" for i in (3, 4, 5)}
            if isinstance(caught.value, DeadlineError):
                assert caught.value.missing == ("rollout worker 0",)
        finally:
            process.kill()
            process.join()


class TestStoreAndPeers:
    @both_kinds
    def test_rendezvous_repeated_does_not_grow_store(self, kind: type[Transport]) -> None:
        ranks = connect_all(2, 20, kind)

        def rendezvous(n: int) -> int:
            futures = [spawn(lambda rank=rank: [rank.peers.rendezvous("m", "x") for _ in range(n)]) for rank in ranks]  # type: ignore[misc]
            for future in futures:
                assert len(future.result(PATIENCE_S)) == n
            return int(ranks[0].peers.mailbox.store.num_keys())

        assert rendezvous(3) == rendezvous(100) == rendezvous(1)

    def test_rendezvous_after_deadline_error_contains_reports(self) -> None:
        sender, bad, _ = connect_all(2, 0.5)
        bad.peers.abandon("the device is full")
        sender.peers.mailbox.store = SlowStore(sender.peers.mailbox.store)
        sender.peers.deadline = time.monotonic() - 1
        with raises((WeightSyncError, DeadlineError), phase=f"{TRANSPORT}, late") as caught:
            sender.peers.rendezvous("late")
        assert "the device is full" in caught.value.what  # reported by the other rank
        with pytest.raises(TransportClosed):
            sender.peers.check_open()

    @both_kinds
    def test_interrupt_ends_waits_of_all_ranks(self, kind: type[Transport]) -> None:
        sender, first, _ = connect_all(2, 600, kind)
        sending = spawn(lambda: send_weights(sender, 3, META, make_weights().items(), BUCKET_BYTES))
        receiving = spawn(lambda: receive_weights(first, 3, META, BUCKET_BYTES, ignore))
        interrupt("127.0.0.1", sender.peers.mailbox.store.port, "rollout worker 1 died")
        for rank in (sending, receiving):
            with raises(WeightSyncError) as caught:
                rank.result(PATIENCE_S)
            assert "rollout worker 1 died" in caught.value.what

    def test_interrupt_with_stopped_store_process_returns(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", _HOLD_STORE], stdin=-1, stdout=-1, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGSTOP)
            spawn(lambda: interrupt("127.0.0.1", port, "rollout worker 1 died")).result(PATIENCE_S)
        finally:
            process.kill()
            process.communicate()

    def test_connect_missing_rank_is_named(self) -> None:
        store = open_store("127.0.0.1", 1.0)

        def join() -> Transport:
            client = join_store("127.0.0.1", store.port, 1.0)
            return CollectiveTransport(client, rank=2, labels=LABELS[:3], device=CPU, timeout_s=1.0)

        joining = spawn(join)
        with raises(DeadlineError, phase=f"{TRANSPORT}, connect", missing=("rollout worker 0",)):
            CollectiveTransport(store, rank=0, labels=LABELS[:3], device=CPU, timeout_s=1.0)
        with raises((DeadlineError, WeightSyncError), phase=f"{TRANSPORT}, connect"):
            joining.result(PATIENCE_S)

    def test_join_store_absent_store_is_named(self) -> None:
        port = open_store("127.0.0.1", 1.0).port  # the store is closed again
        with raises(WeightSyncError, phase=f"{TRANSPORT}, connect"):
            join_store("127.0.0.1", port, 1.0)


class TestMemory:
    def test_buffer_pool_reuses_memory_after_last_reference(self) -> None:
        pool = BufferPool(CPU)
        first = pool.lend(100)
        address, view = first.data_ptr(), first[10:20].view(torch.int16)
        del first
        assert pool.lend(50).data_ptr() != address
        del view
        assert address in {buffer.data_ptr() for buffer in [pool.lend(100), pool.lend(100)]}

    def test_ipc_transport_leaves_no_shared_memory(self) -> None:
        gc.collect()
        before = sum("memfd:weights" in target for target in open_files())

        def update() -> None:
            sender, receiver = connect_all(1, 10, IpcTransport)
            receiving = spawn(lambda: receive_weights(receiver, 1, META, BUCKET_BYTES, ignore))
            send_weights(sender, 1, META, make_weights().items(), BUCKET_BYTES)
            receiving.result(PATIENCE_S)
            assert sum("memfd:weights" in target for target in open_files()) > before
            for transport in (sender, receiver):
                transport.close()

        update()
        gc.collect()
        assert sum("memfd:weights" in target for target in open_files()) == before

    @both_kinds
    def test_close_discarded_transport_frees_store(self, kind: type[Transport]) -> None:
        gc.disable()  # the store must not depend on the collection of a reference cycle
        try:
            ranks = connect_all(1, 10, kind)
            port = ranks[0].peers.mailbox.store.port
            for transport in ranks:
                transport.close()
            del ranks, transport
            with raises(WeightSyncError, phase=f"{TRANSPORT}, connect"):
                join_store("127.0.0.1", port, 1.0)
        finally:
            gc.enable()
