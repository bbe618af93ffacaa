"""The actor's end of an update: pack, send, and have every receiver confirm."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weights.buckets import Bucket, Checksum, TensorMeta, fingerprint, pack, plan_buckets
from recipe_gkd.weights.channel import Channel
from recipe_gkd.weights.stats import TransferStats


def send_weights(
    channel: Channel,
    version: int,
    meta: Sequence[TensorMeta],
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
) -> TransferStats:
    """Send ``tensors``, in the order and with the shapes and dtypes of ``meta``, to every other rank of ``channel``.

    Packing the next bucket overlaps with sending the last one, in two buffers. Returns when every receiver has
    confirmed the checksum. Raises :class:`WeightSyncError` or :class:`DeadlineError`, and then the channel is closed.
    """
    channel.begin_update()
    name = f"weights v{version}"
    try:
        buckets = plan_buckets(meta, bucket_bytes)
        _agree(channel, fingerprint(version, meta, bucket_bytes), name)
        started = time.monotonic()
        checksum = _send_buckets(channel, buckets, iter(tensors), name)
        _confirm(channel, checksum, name)
    except GkdError as error:
        channel.abandon(str(error))
        raise
    except Exception as error:  # noqa: BLE001 - of the export, say: the receivers must not wait for the rest of it
        channel.fail(f"{name}, export", error)
    return TransferStats(
        version=version,
        seconds=time.monotonic() - started,
        n_bytes=sum(bucket.n_bytes for bucket in buckets),
        n_buckets=len(buckets),
        checksum=checksum,
    )


def _agree(channel: Channel, own: str, name: str) -> None:
    """No byte is sent before every receiver is there and has planned the same buckets."""
    heard = channel.meet(f"{name}, begin", own)
    if different := {rank: theirs for rank, theirs in heard.items() if theirs != own}:
        who = ", ".join(f"{channel.labels[rank]} has {theirs}" for rank, theirs in different.items())
        raise WeightSyncError(
            f"{name}, begin: the sender has plan {own}, but {who}; all must be given the same version, "
            "weights_meta and bucket size"
        )


def _send_buckets(
    channel: Channel, buckets: Sequence[Bucket], tensors: Iterator[tuple[str, torch.Tensor]], name: str
) -> str:
    checksum = Checksum(channel.device)
    size = max((bucket.n_bytes for bucket in buckets), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=channel.device) for _ in buckets[:2]]
    in_flight: tuple[dist.Work, str] | None = None
    for i, bucket in enumerate(buckets):
        phase = f"{name}, bucket {i + 1} of {len(buckets)}"
        buffer_U = buffers[i % 2][: bucket.n_bytes]
        for slot in bucket.slots:
            pack(slot, _next_tensor(tensors, slot.name), buffer_U)
        checksum.add(buffer_U)
        if in_flight:
            channel.finish(*in_flight)
        channel.meet(phase)
        in_flight = channel.broadcast(buffer_U), phase
    if in_flight:
        channel.finish(*in_flight)
    if (extra := next(tensors, None)) is not None:
        raise WeightSyncError(f"{name}: the actor exported {extra[0]} after all the weights that it had announced")
    return checksum.value()


def _next_tensor(tensors: Iterator[tuple[str, torch.Tensor]], expected: str) -> torch.Tensor:
    found, tensor = next(tensors, (None, None))
    if found is None or tensor is None:
        raise WeightSyncError(f"the actor's export ended where {expected} was due; weights_meta() announced it")
    if found != expected:
        raise WeightSyncError(f"the actor exported {found} where {expected} was due; keep the order of weights_meta()")
    return tensor


def _confirm(channel: Channel, checksum: str, name: str) -> None:
    heard = channel.meet(f"{name}, confirm", checksum)
    if different := {rank: theirs for rank, theirs in heard.items() if theirs != checksum}:
        who = ", ".join(f"{channel.labels[rank]} has {theirs}" for rank, theirs in different.items())
        raise WeightSyncError(f"{name}, confirm: checksum {checksum} was sent, but {who}; the update is void")
