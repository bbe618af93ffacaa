"""Receiving side of an update, independent of the engine: it passes each bucket to a function that loads it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import Bucket, Checksum, TensorMeta, unpack
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.store import one_line
from recipe_gkd.weight_sync.transport import Transport

NamedTensors = list[tuple[str, torch.Tensor]]

_MAX_BUCKETS_AHEAD = 2
"""Buckets in memory at a time: one that is loaded and one that is received."""


def receive_weights(
    transport: Transport,
    version: int,
    meta: Sequence[TensorMeta],
    bucket_bytes: int,
    load: Callable[[NamedTensors], None],
) -> TransferStats:
    """Receive one update, and return when all buckets are loaded and the checksum equals the sender's.

    The next bucket is received while ``load`` runs. ``load`` is first called after the first bucket has arrived, so a
    sender that never connects changes nothing.

    Args:
        transport: A rank other than 0. It is closed if the call fails.
        version: Version of the weights.
        meta: Tensors of the update, in order.
        bucket_bytes: Maximum size of a bucket.
        load: Called with the tensors of each bucket, in order. It may keep them: their memory is reused only after
            the last reference is gone.

    Raises:
        WeightSyncError: A rank failed, ``load`` raised, or plan or checksum differ from the sender's.
        DeadlineError: The sender did not answer before the deadline.
    """
    peers = transport.peers
    peers.begin_update()
    name = f"weights v{version}"
    try:
        plan = transport.plan(meta, bucket_bytes)
        fingerprint = plan.fingerprint(version)
        expected = peers.rendezvous(f"{name}, begin", fingerprint)[0]
        if expected != fingerprint:
            what = f"the sender has plan {expected}, this receiver {fingerprint}"
            raise WeightSyncError(what, phase=f"{name}, begin")
        started = time.monotonic()
        checksum = Checksum(transport.device)
        with _BucketReceiverThread(transport, plan.buckets, name) as received:
            for bucket, buffer_U in received:
                _keep_until_read(buffer_U)
                checksum.add(buffer_U)
                load(unpack(bucket, buffer_U))
                del buffer_U
        value = checksum.value()
        sent = peers.rendezvous(f"{name}, confirm", value)[0]
        if value != sent:
            raise WeightSyncError(
                f"checksum {value} was received, but {sent} was sent; the update is discarded",
                phase=f"{name}, confirm",
                remedy="sync again",
            )
    except GkdError as error:
        peers.abandon(str(error))
        raise
    except Exception as error:  # noqa: BLE001 - raised again, and reported to the sender
        peers.fail(f"{name}, load", error)
    return TransferStats(seconds=time.monotonic() - started, n_bytes=plan.n_bytes, checksum=value)


def _keep_until_read(buffer_U: torch.Tensor) -> None:
    """Reserve the memory of a bucket until the current stream of this thread has read it.

    The receiving thread allocates it on its own stream. vLLM's workers load on another one, and without this call
    torch would give the memory to the next bucket as soon as the last tensor is gone, before those loads have run.
    """
    if buffer_U.is_cuda:
        buffer_U.record_stream(torch.cuda.current_stream(buffer_U.device))


class _BucketReceiverThread:
    """Context manager that yields the buckets of an update in order, with their bytes.

    A thread waits at each rendezvous and receives, so that neither waits for the caller's loading. Until the context
    ends, only this thread uses the transport. Leaving the context joins it; if the caller has failed, an interruption
    of the sender ends its wait.
    """

    def __init__(self, transport: Transport, buckets: Sequence[Bucket], name: str) -> None:
        self._transport, self._buckets, self._name = transport, buckets, name
        self._received: queue.SimpleQueue[tuple[Bucket, torch.Tensor] | BaseException | None] = queue.SimpleQueue()
        self._free_slots = threading.Semaphore(_MAX_BUCKETS_AHEAD)
        self._canceled = False
        self._thread = threading.Thread(target=self._main, name="receive-weights", daemon=True)

    def __enter__(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        self._thread.start()
        return self._iterate()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._canceled = True
            self._free_slots.release()
            if self._thread.is_alive():
                self._transport.peers.interrupt(f"{self._name}, load: {one_line(error)}")
        self._thread.join()

    def _iterate(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        while (item := self._received.get()) is not None:
            if isinstance(item, BaseException):
                self._thread.join()
                raise item
            yield item
            del item  # a reference here would keep the memory from being reused
            self._free_slots.release()

    def _main(self) -> None:
        try:
            if self._transport.device.type == "cuda":
                torch.cuda.set_device(self._transport.device)  # the current device is a property of the thread
            self._receive()
            self._received.put(None)
        except BaseException as error:  # noqa: BLE001 - raised by the iterator
            self._received.put(error)

    def _receive(self) -> None:
        in_flight: deque[tuple[Any, str, Bucket, torch.Tensor]] = deque()

        def finish_first() -> None:
            work, phase, bucket, buffer_U = in_flight.popleft()
            self._transport.finish(work, phase)
            self._received.put((bucket, buffer_U))

        for i, bucket in enumerate(self._buckets):
            if not self._free_slots.acquire(blocking=False):
                if in_flight:
                    finish_first()  # loading is the bottleneck: its next bucket must not wait for a rendezvous
                self._free_slots.acquire()
            if self._canceled:
                return
            phase = f"{self._name}, bucket {i + 1} of {len(self._buckets)}"
            self._transport.peers.rendezvous(phase)
            buffer_U = self._transport.receive_buffer(bucket.n_bytes)
            in_flight.append((self._transport.broadcast(buffer_U), phase, bucket, buffer_U))
            del buffer_U
            if len(in_flight) == _MAX_BUCKETS_AHEAD:
                finish_first()
        while in_flight:
            finish_first()
