"""A rollout worker's end of an update, without the engine: it hands bucket after bucket to whoever loads them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import Bucket, Checksum, TensorMeta, views
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.transport import Transport, flat

NamedTensors = list[tuple[str, torch.Tensor]]

_AHEAD = 2
"""Buckets at a time: one that is loaded and one that is on its way."""


def receive_weights(
    channel: Transport,
    version: int,
    meta: Sequence[TensorMeta],
    bucket_bytes: int,
    take: Callable[[NamedTensors], None],
) -> TransferStats:
    """Receive one update; ``take`` is called for each bucket, while the next one is on its way.

    ``take`` may keep the tensors: memory is used again only when nobody holds it. It is first called when the first
    bucket is there: if the sender never comes, nothing has happened. Returns when all buckets were taken and the
    checksum is the sender's. Raises :class:`WeightSyncError` or :class:`DeadlineError`, also for what ``take`` raised,
    and then the channel is closed.
    """
    channel.begin_update()
    name = f"weights v{version}"
    try:
        plan = channel.plan(meta, bucket_bytes)
        own = plan.fingerprint(version)
        theirs = channel.rendezvous(f"{name}, begin", own)[0]
        if theirs != own:
            raise WeightSyncError(f"{name}, begin: the sender has plan {theirs}, this receiver {own}")
        started = time.monotonic()
        checksum = Checksum(channel.device)
        with _Arrivals(channel, plan.buckets, name) as arrivals:
            for bucket, buffer_U in arrivals:
                checksum.add(buffer_U)
                take(views(bucket, buffer_U))
                del buffer_U
        value = checksum.value()
        sent = channel.rendezvous(f"{name}, confirm", value)[0]
        if value != sent:
            raise WeightSyncError(f"{name}, confirm: checksum {value} was received, but {sent} was sent: it is void")
    except GkdError as error:
        channel.abandon(str(error))
        raise
    except Exception as error:  # noqa: BLE001 - raised again, and told to the sender
        channel.fail(f"{name}, load", error)
    return TransferStats(seconds=time.monotonic() - started, n_bytes=plan.n_bytes, checksum=value)


class _Arrivals:
    """Iterates the buckets in order, with what was received; raises what went wrong on the way.

    A thread of its own meets and receives, so that neither waits for the caller's loading. Only it uses the channel
    until the context is left, which waits for its end; if the caller has failed, the sender is told, and tells it.
    """

    def __init__(self, channel: Transport, buckets: Sequence[Bucket], name: str) -> None:
        self._channel, self._buckets, self._name = channel, buckets, name
        self._arrived: queue.SimpleQueue[tuple[Bucket, torch.Tensor] | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        self._left = False
        self._thread = threading.Thread(target=self._main, name="receive-weights", daemon=True)

    def __enter__(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        self._thread.start()
        return self._iterate()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._left = True
            self._room.release()
            if self._thread.is_alive():
                self._channel.interrupt(f"{self._name}, load: {flat(error)}")
        self._thread.join()

    def _iterate(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        while (item := self._arrived.get()) is not None:
            if isinstance(item, BaseException):
                self._thread.join()
                raise item
            yield item
            del item  # or its memory could not be used for the next one
            self._room.release()

    def _main(self) -> None:
        try:
            if self._channel.device.type == "cuda":
                torch.cuda.set_device(self._channel.device)  # is per thread
            self._receive()
            self._arrived.put(None)
        except BaseException as error:  # noqa: BLE001 - raised by the iterator
            self._arrived.put(error)

    def _receive(self) -> None:
        under_way: deque[tuple[Any, str, Bucket, torch.Tensor]] = deque()

        def hand_over() -> None:
            work, phase, bucket, buffer_U = under_way.popleft()
            self._channel.finish(work, phase)
            self._arrived.put((bucket, buffer_U))

        for i, bucket in enumerate(self._buckets):
            if not self._room.acquire(blocking=False):
                if under_way:
                    hand_over()  # loading is the slowest part: what it takes next shall not wait for a meeting
                self._room.acquire()
            if self._left:
                return
            phase = f"{self._name}, bucket {i + 1} of {len(self._buckets)}"
            self._channel.rendezvous(phase)
            buffer_U = self._channel.receive_buffer(bucket.n_bytes)
            under_way.append((self._channel.broadcast(buffer_U), phase, bucket, buffer_U))
            del buffer_U
            if len(under_way) == _AHEAD:
                hand_over()
        while under_way:
            hand_over()
