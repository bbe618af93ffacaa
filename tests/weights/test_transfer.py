"""One update between real ends over gloo: what arrives, and how every way to fail ends in time."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch
from ends import CPU, LABELS, META, Timer, connect, spawn, stalls, weights

from recipe_gkd.errors import DeadlineError, WeightSyncError
from recipe_gkd.weights.actor_side import ActorWeights
from recipe_gkd.weights.channel import Channel, interrupt, join_store, open_store
from recipe_gkd.weights.receiver import NamedTensors, receive_weights
from recipe_gkd.weights.sender import send_weights

pytestmark = pytest.mark.timeout(60)
BUCKET = 3000  # one tensor of 1600 bytes in each


def ignore(_: NamedTensors) -> None:
    pass


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 5000, 1 << 20])
def test_all_receivers_get_the_bits_in_order_and_agree_on_the_checksum(bucket_bytes: int) -> None:
    sender, *receivers = connect(2, 10)
    sums = []
    for version in (1, 2):
        sent = weights(seed=version)
        taken: list[NamedTensors] = [[] for _ in receivers]
        ends = [
            spawn(lambda c=c, t=t, v=version: receive_weights(c, v, META, bucket_bytes, t.extend))  # type: ignore[misc]
            for c, t in zip(receivers, taken, strict=True)
        ]
        stats = send_weights(sender, version, META, sent.items(), bucket_bytes)
        results = [end.result(10) for end in ends]
        for received in taken:
            assert [name for name, _ in received] == list(sent)
            assert all(t.dtype == sent[name].dtype and torch.equal(t, sent[name]) for name, t in received)
        assert {result.checksum for result in results} == {stats.checksum}
        assert stats.n_bytes == sum(-(-t.nbytes // 16) * 16 for t in sent.values()) and stats.version == version
        sums.append(stats.checksum)
    assert sums[0] != sums[1]


def test_the_store_does_not_grow_with_the_number_of_meetings() -> None:
    ends = connect(2, 20)

    def meet(n: int) -> int:
        for future in [spawn(lambda end=end: [end.meet("m", "x") for _ in range(n)]) for end in ends]:  # type: ignore[misc]
            assert len(future.result(20)) == n
        return int(ends[0]._store.num_keys())

    assert meet(3) == meet(100) == meet(1)


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
    assert timer.seconds < 2 and not taken


def test_a_sender_that_stops_midway_is_named_within_the_deadline() -> None:
    sender, receiver = connect(1, 1.5)
    resume = threading.Event()
    sending = spawn(lambda: send_weights(sender, 3, META, stalls(3, resume), BUCKET))
    with Timer() as timer, pytest.raises(DeadlineError, match="weights v3, bucket 4 of 5: actor worker 0") as caught:
        receive_weights(receiver, 3, META, BUCKET, ignore)
    assert timer.seconds < 2.5
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
    assert timer.seconds < 5


def test_a_receiver_that_cannot_load_is_named_with_its_reason() -> None:
    sender, good, bad = connect(2, 5)

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
    assert timer.seconds < 2


def test_a_driver_can_end_the_wait_for_a_receiver_that_it_knows_to_be_dead() -> None:
    sender, first, _ = connect(2, 20)
    sending = spawn(lambda: send_weights(sender, 3, META, weights().items(), BUCKET))
    receiving = spawn(lambda: receive_weights(first, 3, META, BUCKET, ignore))
    with Timer() as timer:
        interrupt("127.0.0.1", sender._store.port, 3, "rollout worker 1 died")
        for end in (sending, receiving):
            with pytest.raises(WeightSyncError, match="rollout worker 1 died"):
                end.result(10)
    assert timer.seconds < 5


def test_who_does_not_join_is_named() -> None:
    store = open_store("127.0.0.1", 1.0)
    joining = spawn(
        lambda: Channel(join_store("127.0.0.1", store.port, 1.0), rank=2, labels=LABELS, device=CPU, timeout_s=1.0)
    )
    with pytest.raises(DeadlineError, match=r"connect: rollout worker 0 .channel rank 1 of 3. did not answer"):
        Channel(store, rank=0, labels=LABELS, device=CPU, timeout_s=1.0)
    with pytest.raises((DeadlineError, WeightSyncError), match="connect"):
        joining.result(5)


def test_a_store_that_is_not_there_is_named() -> None:
    port = open_store("127.0.0.1", 1.0).port  # closed again: nobody holds it
    with pytest.raises(WeightSyncError, match=f"nobody answered at 127.0.0.1:{port} within 1 s"):
        join_store("127.0.0.1", port, 1.0)


def _die_in_the_second_bucket(port: int) -> None:
    channel = Channel(join_store("127.0.0.1", port, 20), rank=1, labels=LABELS[:2], device=CPU, timeout_s=20)
    seen: list[Any] = []

    def take(tensors: NamedTensors) -> None:
        seen.append(tensors)
        if len(seen) == 2:
            os._exit(1)

    receive_weights(channel, 3, META, BUCKET, take)


def test_a_receiver_that_dies_is_named_at_the_deadline() -> None:
    store = open_store("127.0.0.1", 20)
    process = multiprocessing.get_context("spawn").Process(target=_die_in_the_second_bucket, args=(store.port,))
    process.start()
    try:
        sender = Channel(store, rank=0, labels=LABELS[:2], device=CPU, timeout_s=20)
        sender.timeout_s = 1.0  # the rest of the 20 s was for a new process to import torch
        with Timer() as timer, pytest.raises(DeadlineError, match=r"bucket 3 of 5: rollout worker 0 .* did not answer"):
            send_weights(sender, 3, META, weights().items(), BUCKET)
        assert timer.seconds < 2
    finally:
        process.kill()
        process.join()


def test_ends_with_different_plans_refuse_before_anything_is_sent() -> None:
    sender, receiver = connect(1, 5)
    taken: NamedTensors = []
    receiving = spawn(lambda: receive_weights(receiver, 4, META, BUCKET, taken.extend))
    with pytest.raises(WeightSyncError, match=r"begin: the sender has plan v3-.*, but rollout worker 0 has v4-"):
        send_weights(sender, 3, META, weights().items(), BUCKET)
    with pytest.raises(WeightSyncError, match=r"begin: the sender has plan v3-.*, this receiver v4-"):
        receiving.result(5)
    assert not taken


class FlippingChannel(Channel):
    """Flips a bit of what it receives."""

    def broadcast(self, buffer_U: torch.Tensor) -> Any:
        self._last = buffer_U
        return super().broadcast(buffer_U)

    def finish(self, work: Any, phase: str) -> None:
        super().finish(work, phase)
        self._last[5] ^= 1


def test_a_flipped_bit_voids_the_update_on_both_ends() -> None:
    sender, receiver = connect(1, 5, FlippingChannel)
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
    actor = ActorWeights(source, rank=rank, device=CPU, timeout_s=1.0)
    if rank == 0:
        with pytest.raises(WeightSyncError, match="no weight channel"):
            actor.send(1, BUCKET)
    else:
        assert actor.send(1, BUCKET) is None
    assert source.n_exported == len(META)
