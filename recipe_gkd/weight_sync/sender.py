"""The actor's end of an update: pack, send, and have every receiver confirm."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import Bucket, Checksum, TensorMeta, in_place, pack
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.transport import Transport


def send_weights(
    channel: Transport,
    version: int,
    meta: Sequence[TensorMeta],
    tensors: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
) -> TransferStats:
    """Send ``tensors``, in the order and with the shapes and dtypes of ``meta``, to every other rank of ``channel``.

    Packing the next bucket, and meeting for it, overlap with sending the last one, in two buffers; a tensor that fills
    a bucket alone is sent from where it is, if ``channel`` can do that, and must stay as it is until then. Returns when
    every receiver has confirmed the checksum. Raises :class:`WeightSyncError` or :class:`DeadlineError`, and then the
    channel is closed.
    """
    channel.begin_update()
    name = f"weights v{version}"
    try:
        plan = channel.plan(meta, bucket_bytes)
        _agree(channel, plan.fingerprint(version), name)
        started = time.monotonic()
        checksum = _send_buckets(channel, plan.buckets, iter(tensors), name)
        _confirm(channel, checksum, name)
    except GkdError as error:
        channel.abandon(str(error))
        raise
    except Exception as error:  # noqa: BLE001 - of the export, say: the receivers must not wait for the rest of it
        channel.fail(f"{name}, export", error)
    return TransferStats(seconds=time.monotonic() - started, n_bytes=plan.n_bytes, checksum=checksum)


def _agree(channel: Transport, own: str, name: str) -> None:
    """No byte is sent before every receiver is there and has planned the same buckets."""
    heard = channel.rendezvous(f"{name}, begin", own)
    if different := {rank: theirs for rank, theirs in heard.items() if theirs != own}:
        who = ", ".join(f"{channel.labels[rank]} has {theirs}" for rank, theirs in different.items())
        raise WeightSyncError(
            f"{name}, begin: the sender has plan {own}, but {who}; all must be given the same version, "
            "weights_meta and bucket size"
        )


def _send_buckets(
    channel: Transport, buckets: Sequence[Bucket], tensors: Iterator[tuple[str, torch.Tensor]], name: str
) -> str:
    def is_packed(bucket: Bucket) -> bool:
        return not (channel.sends_in_place and bucket.is_one_tensor)

    sizes = [bucket.n_bytes for bucket in buckets if is_packed(bucket)]
    buffers = channel.buffers(min(2, len(sizes)), max(sizes, default=0))
    checksum = Checksum(buffers[0].device if buffers else channel.device)
    turns = itertools.cycle(buffers)
    on_its_way: tuple[Any, str, torch.Tensor] | None = None
    for i, bucket in enumerate(buckets):
        phase = f"{name}, bucket {i + 1} of {len(buckets)}"
        if is_packed(bucket):
            buffer_U = next(turns)[: bucket.n_bytes]
            pack(bucket, tensors, buffer_U)
        else:
            buffer_U = in_place(bucket, tensors)
        checksum.add(buffer_U)
        channel.rendezvous(phase)
        previous, on_its_way = on_its_way, (channel.broadcast(buffer_U), phase, buffer_U)
        if previous:
            channel.finish(*previous[:2])
    if on_its_way:
        channel.finish(*on_its_way[:2])
    if (extra := next(tensors, None)) is not None:
        raise WeightSyncError(f"{name}: the actor exported {extra[0]} after all the weights that it had announced")
    return checksum.value()


def _confirm(channel: Transport, checksum: str, name: str) -> None:
    heard = channel.rendezvous(f"{name}, confirm", checksum)
    if different := {rank: theirs for rank, theirs in heard.items() if theirs != checksum}:
        who = ", ".join(f"{channel.labels[rank]} has {theirs}" for rank, theirs in different.items())
        raise WeightSyncError(f"{name}, confirm: checksum {checksum} was sent, but {who}; the update is void")
