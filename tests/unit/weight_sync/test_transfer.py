"""One update between real ends over gloo: what arrives, and how every way to fail ends in time."""

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
from recipe_gkd.weight_sync.receiver import NamedTensors, receive_weights
from recipe_gkd.weight_sync.sender import send_weights
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.transport import Transport, interrupt, join_store, open_store
from tests.unit.weight_sync.ends import CPU, KINDS, LABELS, META, Timer, connect, spawn, stalls, weights

pytestmark = pytest.mark.timeout(60)
BUCKET = 3000  # one tensor of 1600 bytes in each
both = pytest.mark.parametrize("kind", KINDS)


def ignore(_: NamedTensors) -> None:
    pass


@both
@pytest.mark.parametrize("n_receivers", [1, 2, 3])
def test_all_receivers_get_the_bits_in_order_and_agree_on_the_checksum_at_any_bucket_size(
    n_receivers: int, kind: type[Transport]
) -> None:
    sender, *receivers = connect(n_receivers, 20, kind)
    sums = set()
    for version, bucket_bytes in enumerate([1, 1601, 4999, 4999, 1 << 20]):
        sent = weights(seed=version)
        taken: list[NamedTensors] = [[] for _ in receivers]
        ends = [
            spawn(lambda c=c, t=t, v=version, b=bucket_bytes: receive_weights(c, v, META, b, t.extend))  # type: ignore[misc]
            for c, t in zip(receivers, taken, strict=True)
        ]
        stats = send_weights(sender, version, META, sent.items(), bucket_bytes)
        results = [end.result(10) for end in ends]
        for received in taken:
            assert [name for name, _ in received] == list(sent)
            assert all(t.dtype == sent[name].dtype and torch.equal(t, sent[name]) for name, t in received)
        assert {result.checksum for result in results} == {stats.checksum}
        assert stats.n_bytes == sum(-(-t.nbytes // 16) * 16 for t in sent.values())
        sums.add(stats.checksum)
    assert len(sums) == 5


@both
def test_the_store_does_not_grow_with_the_number_of_meetings(kind: type[Transport]) -> None:
    ends = connect(2, 20, kind)

    def rendezvous(n: int) -> int:
        for future in [spawn(lambda end=end: [end.rendezvous("m", "x") for _ in range(n)]) for end in ends]:  # type: ignore[misc]
            assert len(future.result(20)) == n
        return int(ends[0].store.num_keys())

    assert rendezvous(3) == rendezvous(100) == rendezvous(1)


def test_a_sender_that_never_comes_changes_nothing() -> None:
    _, receiver = connect(1, 1.0)
    taken: NamedTensors = []
    with (
        Timer() as timer,
        pytest.raises(
            DeadlineError, match=r"weights v3, begin: actor worker 0 .* did not answer rollout worker 0 .* within 1 s"
        ),
    ):
        receive_weights(receiver, 3, META, BUCKET, taken.extend)
    assert timer.seconds < 8 and not taken


@both
def test_a_sender_that_stops_midway_is_named_within_the_deadline(kind: type[Transport]) -> None:
    sender, receiver = connect(1, 1.5, kind)
    resume = threading.Event()
    sending = spawn(lambda: send_weights(sender, 3, META, stalls(3, resume), BUCKET))
    with Timer() as timer, pytest.raises(DeadlineError, match="weights v3, bucket 4 of 5: actor worker 0") as caught:
        receive_weights(receiver, 3, META, BUCKET, ignore)
    assert timer.seconds < 8
    with pytest.raises(WeightSyncError, match=r"this weight channel is closed.*bucket 4 of 5"):
        receive_weights(receiver, 4, META, BUCKET, ignore)
    resume.set()
    with pytest.raises((WeightSyncError, DeadlineError), match="rollout worker 0"):
        sending.result(5)
    assert "nccl_timeout" in str(caught.value)


def test_an_export_that_raises_is_told_to_the_receivers_at_once() -> None:
    sender, receiver = connect(1, 20)

    def export() -> Any:
        yield from list(weights().items())[:3]
        raise ZeroDivisionError("no such expert")

    receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET, ignore))
    with Timer() as timer:
        with pytest.raises(WeightSyncError, match=r"weights v3, export: .*no such expert"):
            send_weights(sender, 3, META, export(), BUCKET)
        with pytest.raises(WeightSyncError, match=r"actor worker 0 .* reported: .*no such expert"):
            receiving.result(20)
    assert timer.seconds < 10


@both
def test_a_receiver_that_cannot_load_is_named_with_its_reason(kind: type[Transport]) -> None:
    sender, good, bad = connect(2, 5, kind)

    def refuse(_: NamedTensors) -> None:
        raise MemoryError("the device is full")

    ends = [
        spawn(lambda: receive_weights(good, 3, META, BUCKET, ignore)),
        spawn(lambda: receive_weights(bad, 3, META, BUCKET, refuse)),
    ]
    with pytest.raises((WeightSyncError, DeadlineError), match=r"rollout worker 1 .* reported: .*the device is full"):
        send_weights(sender, 3, META, weights().items(), BUCKET)
    with pytest.raises(WeightSyncError, match="the device is full"):
        ends[1].result(10)
    with pytest.raises((WeightSyncError, DeadlineError)):
        ends[0].result(10)


def test_a_receiver_that_never_comes_is_named() -> None:
    sender, first, _ = connect(2, 1.0)
    spawn(lambda: receive_weights(first, 3, META, BUCKET, ignore))
    with Timer() as timer, pytest.raises(DeadlineError, match=r"weights v3, begin: rollout worker 1 .* did not answer"):
        send_weights(sender, 3, META, weights().items(), BUCKET)
    assert timer.seconds < 8


@both
def test_a_driver_can_end_the_wait_for_a_receiver_that_it_knows_to_be_dead(kind: type[Transport]) -> None:
    sender, first, _ = connect(2, 20, kind)
    sending = spawn(lambda: send_weights(sender, 3, META, weights().items(), BUCKET))
    receiving = spawn(lambda: receive_weights(first, 3, META, BUCKET, ignore))
    with Timer() as timer:
        interrupt("127.0.0.1", sender.store.port, "rollout worker 1 died")
        for end in (sending, receiving):
            with pytest.raises(WeightSyncError, match="rollout worker 1 died"):
                end.result(10)
    assert timer.seconds < 10


_HOLD_A_STORE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def test_to_interrupt_ends_soon_even_if_the_stores_process_is_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", _HOLD_A_STORE], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGSTOP)
        with Timer() as timer:
            spawn(lambda: interrupt("127.0.0.1", port, "rollout worker 1 died")).result(5)
        assert timer.seconds < 3
    finally:
        process.kill()
        process.communicate()


class Hasty:
    """A store that answers no sooner than within 0.1 s."""

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


def test_what_others_reported_is_told_and_the_channel_closed_even_when_the_time_is_over() -> None:
    sender, bad, _ = connect(2, 0.5)
    bad.abandon("the device is full")
    sender.store = Hasty(sender.store)
    sender.deadline = time.monotonic() - 1
    with pytest.raises((WeightSyncError, DeadlineError), match=r"rollout worker 0 .* reported: the device is full"):
        sender.rendezvous("late")
    with pytest.raises(WeightSyncError, match="this weight channel is closed"):
        sender.check_alive()


def test_who_does_not_join_is_named() -> None:
    store = open_store("127.0.0.1", 1.0)
    joining = spawn(
        lambda: CollectiveTransport(join_store("127.0.0.1", store.port, 1.0), rank=2, labels=LABELS[:3], device=CPU, timeout_s=1.0)
    )
    with pytest.raises(DeadlineError, match=r"connect: rollout worker 0 .channel rank 1 of 3. did not answer"):
        CollectiveTransport(store, rank=0, labels=LABELS[:3], device=CPU, timeout_s=1.0)
    with pytest.raises((DeadlineError, WeightSyncError), match="connect"):
        joining.result(5)


def test_a_store_that_is_not_there_is_named() -> None:
    port = open_store("127.0.0.1", 1.0).port  # closed again: nobody holds it
    with pytest.raises(WeightSyncError, match=f"nobody answered at 127.0.0.1:{port} within 1 s"):
        join_store("127.0.0.1", port, 1.0)


def _die_in_the_second_bucket(port: int, kind: type[Transport]) -> None:
    channel = kind(join_store("127.0.0.1", port, 20), rank=1, labels=LABELS[:2], device=CPU, timeout_s=20)
    seen: list[Any] = []

    def take(tensors: NamedTensors) -> None:
        seen.append(tensors)
        if len(seen) == 2:
            os._exit(1)

    receive_weights(channel, 3, META, BUCKET, take)


@both
def test_a_receiver_that_dies_in_the_middle_is_named_at_the_deadline(kind: type[Transport]) -> None:
    store = open_store("127.0.0.1", 20)
    process = multiprocessing.get_context("spawn").Process(target=_die_in_the_second_bucket, args=(store.port, kind))
    process.start()
    try:
        sender = kind(store, rank=0, labels=LABELS[:2], device=CPU, timeout_s=20)
        sender.timeout_s = 1.0  # the rest of the 20 s was for a new process to import torch
        with (
            Timer() as timer,
            pytest.raises((DeadlineError, WeightSyncError), match=r"bucket [345] of 5: .*rollout worker 0"),
        ):
            send_weights(sender, 3, META, weights().items(), BUCKET)
        assert timer.seconds < 8
    finally:
        process.kill()
        process.join()


@both
def test_nothing_is_overwritten_before_a_slow_receiver_has_taken_it(kind: type[Transport]) -> None:
    sender, slow, fast = connect(2, 20, kind)
    sent = weights()
    taken: dict[str, list[Any]] = {"slow": [], "fast": []}

    def take(who: str, tensors: NamedTensors) -> None:
        before = [tensor.clone() for _, tensor in tensors]
        if who == "slow":
            time.sleep(0.05)  # the slowness under test: the sender could have packed all the rest meanwhile
        assert all(torch.equal(a, b) for a, (_, b) in zip(before, tensors, strict=True))
        taken[who] += tensors  # kept: their memory is not to be used again

    for version in (1, 2):
        taken = {"slow": [], "fast": []}
        ends = [
            spawn(lambda c=c, w=w, v=version: receive_weights(c, v, META, BUCKET, lambda t: take(w, t)))  # type: ignore[misc]
            for c, w in ((slow, "slow"), (fast, "fast"))
        ]
        send_weights(sender, version, META, sent.items(), BUCKET)
        for end in ends:
            end.result(10)
        for found in taken.values():
            assert all(torch.equal(tensor, sent[name]) for name, tensor in found) and len(found) == len(META)


@both
def test_the_next_bucket_is_received_while_one_is_loaded(kind: type[Transport]) -> None:
    sender, receiver = connect(1, 20, kind)
    loading, packed = threading.Event(), threading.Event()

    def export() -> Any:
        for i, item in enumerate(weights().items()):
            if i == 2:
                assert loading.wait(10)  # the first bucket is being loaded, the second is there, this is the third
                packed.set()
            yield item

    def take(_: NamedTensors) -> None:
        loading.set()
        assert packed.wait(10)

    receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET, take))
    send_weights(sender, 3, META, export(), BUCKET)
    receiving.result(10)


class Recording(CollectiveTransport):
    """Knows what was asked for to pack into, and what was sent."""

    def buffers(self, n: int, n_bytes: int) -> list[torch.Tensor]:
        self.asked = n, n_bytes
        return super().buffers(n, n_bytes)

    def broadcast(self, buffer_U: torch.Tensor) -> Any:
        self.sent = [*getattr(self, "sent", []), buffer_U.data_ptr()]
        return super().broadcast(buffer_U)


def test_what_is_sent_in_place_takes_no_memory_to_pack_into() -> None:
    shapes = [("embed", 4000), *((f"layer.{i}", 64) for i in range(8)), ("head", 4000), ("late", 64)]
    sent = {name: torch.rand(n) for name, n in shapes}
    sent["head"] = torch.rand(4001)[1:]  # not where a bucket may start
    meta: list[TensorMeta] = [(name, (n,), "float32") for name, n in shapes]
    sender, receiver = connect(1, 10, Recording, CollectiveTransport)
    taken: NamedTensors = []
    receiving = spawn(lambda: receive_weights(receiver, 1, meta, 1024, taken.extend))
    send_weights(sender, 1, meta, sent.items(), 1024)
    receiving.result(10)
    assert sender.asked == (2, 1024)
    assert sent["embed"].data_ptr() in sender.sent and sent["head"].data_ptr() not in sender.sent
    assert [name for name, _ in taken] == list(sent) and all(torch.equal(tensor, sent[name]) for name, tensor in taken)


def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    pool = BufferPool(CPU)
    first = pool.lend(100)
    address, view = first.data_ptr(), first[10:20].view(torch.int16)
    del first
    assert pool.lend(50).data_ptr() != address
    del view
    assert address in {buffer.data_ptr() for buffer in [pool.lend(100), pool.lend(100)]}


def test_shared_memory_has_no_name_that_could_be_left_behind() -> None:
    gc.collect()
    before = sum("memfd:weights" in target for target in open_files())

    def update() -> None:
        sender, receiver = connect(1, 10, IpcTransport)
        receiving = spawn(lambda: receive_weights(receiver, 1, META, BUCKET, ignore))
        send_weights(sender, 1, META, weights().items(), BUCKET)
        receiving.result(10)
        assert sum("memfd:weights" in target for target in open_files()) > before
        for end in (sender, receiver):
            end.close()

    update()
    gc.collect()
    assert sum("memfd:weights" in target for target in open_files()) == before


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_ends_with_different_plans_refuse_before_anything_is_sent() -> None:
    sender, receiver = connect(1, 5)
    taken: NamedTensors = []
    receiving = spawn(lambda: receive_weights(receiver, 4, META, BUCKET, taken.extend))
    with pytest.raises(WeightSyncError, match=r"begin: the sender has plan v3-.*, but rollout worker 0 has v4-"):
        send_weights(sender, 3, META, weights().items(), BUCKET)
    with pytest.raises(WeightSyncError, match=r"begin: the sender has plan v3-.*, this receiver v4-"):
        receiving.result(5)
    assert not taken


class FlippingChannel(CollectiveTransport):
    """Flips a bit of what it receives."""

    def broadcast(self, buffer_U: torch.Tensor) -> Any:
        return super().broadcast(buffer_U), buffer_U

    def finish(self, work: Any, phase: str) -> None:
        super().finish(work[0], phase)
        work[1][5] ^= 1


def test_a_flipped_bit_voids_the_update_on_both_ends() -> None:
    sender, receiver = connect(1, 5, CollectiveTransport, FlippingChannel)
    receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET, ignore))
    with pytest.raises(WeightSyncError, match=r"confirm: checksum .* was sent, but rollout worker 0 has"):
        send_weights(sender, 3, META, weights().items(), BUCKET)
    with pytest.raises(WeightSyncError, match=r"confirm: checksum .* was received"):
        receiving.result(5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[:-1], "export ended where bias was due"),
        (lambda items: [*items, ("extra", torch.zeros(1))], "exported extra after all"),
        (lambda items: items[::-1], "exported bias where layer.0.weight was due"),
        (lambda items: [*items[:-1], ("bias", torch.zeros(3))], "bias was exported as .*float32, but announced"),
    ],
)
def test_an_export_that_differs_from_what_was_announced_is_refused(change: Any, message: str) -> None:
    sender, receiver = connect(1, 5)
    receiving = spawn(lambda: receive_weights(receiver, 3, META, BUCKET, ignore))
    with pytest.raises(WeightSyncError, match=message):
        send_weights(sender, 3, META, change(list(weights().items())), BUCKET)
    with pytest.raises(WeightSyncError, match=message):
        receiving.result(5)


class CountingSource:
    def __init__(self) -> None:
        self.n_exported = 0

    def weights_meta(self) -> Any:
        return META

    def export_weights(self) -> Any:
        for item in weights().items():
            yield item
            self.n_exported += 1


@pytest.mark.parametrize("rank", [0, 1])
def test_every_actor_rank_iterates_the_export_to_its_end_even_when_the_sync_fails(rank: int) -> None:
    source = CountingSource()
    actor = WeightSenderApi(source, rank=rank, device=CPU, timeout_s=1.0)
    if rank == 0:
        with pytest.raises(WeightSyncError, match="no weight channel"):
            actor.send(1, BUCKET)
    else:
        assert actor.send(1, BUCKET) is None
    assert source.n_exported == len(META)
