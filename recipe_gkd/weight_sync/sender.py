"""Sending side of an update: pack, send, and wait until every receiver has confirmed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import Bucket, Checksum, TensorMeta, pack, take_single_tensor
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.transport import Transport

_N_PACKING_BUFFERS = 2


def send_weights(
    transport: Transport,
    version: int,
    meta: Sequence[TensorMeta],
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
) -> TransferStats:
    """Send one update to every other rank of a transport, and return when all have confirmed its checksum.

    Packing a bucket, and the rendezvous for it, overlap with the transfer of the bucket before. If the transport can
    send in place, a tensor that fills a bucket alone is not packed, and must not change during the call.

    Args:
        transport: Rank 0 of the transport. It is closed if the call fails.
        version: Version of the weights.
        meta: Tensors of the update, in order.
        tensors: The tensors, with the names, shapes, dtypes and order of ``meta``.
        bucket_bytes: Maximum size of a bucket.

    Raises:
        WeightSyncError: A rank failed, the export differs from ``meta``, or a checksum differs.
        DeadlineError: A receiver did not answer before the deadline.
    """
    peers = transport.peers
    peers.begin_update()
    name = f"weights v{version}"
    try:
        plan = transport.plan(meta, bucket_bytes)
        _confirm_plan(transport, plan.fingerprint(version), name)
        started = time.monotonic()
        checksum = _send_buckets(transport, plan.buckets, iter(tensors), name)
        _confirm_checksum(transport, checksum, name)
    except GkdError as error:
        peers.abandon(str(error))
        raise
    except Exception as error:  # noqa: BLE001 - the export may raise anything, and the receivers must not wait for it
        peers.fail(f"{name}, export", error)
    return TransferStats(seconds=time.monotonic() - started, n_bytes=plan.n_bytes, checksum=checksum)


def _confirm_plan(transport: Transport, fingerprint: str, name: str) -> None:
    """Compare the bucket plans of all receivers with the plan of the sender, before the first byte is sent."""
    if different := _differing(transport, f"{name}, begin", fingerprint):
        raise WeightSyncError(
            f"the sender has plan {fingerprint}, but {different}; all ranks must receive the same version, "
            "weights_meta and bucket size",
            phase=f"{name}, begin",
        )


def _confirm_checksum(transport: Transport, checksum: str, name: str) -> None:
    if different := _differing(transport, f"{name}, confirm", checksum):
        raise WeightSyncError(
            f"checksum {checksum} was sent, but {different}; the update is discarded",
            phase=f"{name}, confirm",
            remedy="sync again",
        )


def _differing(transport: Transport, phase: str, expected: str) -> str:
    """Return the receivers whose message differs from ``expected``, with the message; empty if there are none."""
    collected = transport.peers.rendezvous(phase, expected)
    labels = transport.peers.labels
    return ", ".join(f"{labels[rank]} has {text}" for rank, text in collected.items() if text != expected)


def _send_buckets(
    transport: Transport, buckets: Sequence[Bucket], tensors: Iterator[tuple[str, torch.Tensor]], name: str
) -> str:
    """Send all buckets, and return their checksum."""

    def is_packed(bucket: Bucket) -> bool:
        return not (transport.sends_in_place and bucket.is_single_tensor)

    sizes = [bucket.n_bytes for bucket in buckets if is_packed(bucket)]
    buffers = transport.packing_buffers(min(_N_PACKING_BUFFERS, len(sizes)), max(sizes, default=0))
    checksum = Checksum(buffers[0].device if buffers else transport.device)
    next_buffer = itertools.cycle(buffers)
    in_flight: tuple[Any, str, torch.Tensor] | None = None
    for i, bucket in enumerate(buckets):
        phase = f"{name}, bucket {i + 1} of {len(buckets)}"
        if is_packed(bucket):
            buffer_U = next(next_buffer)[: bucket.n_bytes]
            pack(bucket, tensors, buffer_U)
        else:
            buffer_U = take_single_tensor(bucket, tensors)
        checksum.add(buffer_U)
        transport.peers.rendezvous(phase)
        previous, in_flight = in_flight, (transport.broadcast(buffer_U), phase, buffer_U)
        if previous:
            transport.finish(*previous[:2])
    if in_flight:
        transport.finish(*in_flight[:2])
    if (extra := next(tensors, None)) is not None:
        what = f"the actor exported {extra[0]}, which weights_meta() does not list"
        raise WeightSyncError(what, phase=f"{name}, export", tensors=(extra[0],), remedy="list it")
    return checksum.value()
