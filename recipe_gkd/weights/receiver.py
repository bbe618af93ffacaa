"""A rollout worker's end of an update, without the engine: it hands bucket after bucket to whoever loads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weights.buckets import Checksum, TensorMeta, fingerprint, plan_buckets, views
from recipe_gkd.weights.channel import Channel
from recipe_gkd.weights.stats import TransferStats

NamedTensors = list[tuple[str, torch.Tensor]]


def receive_weights(
    channel: Channel,
    version: int,
    meta: Sequence[TensorMeta],
    bucket_bytes: int,
    take: Callable[[NamedTensors], None],
) -> TransferStats:
    """Receive one update; ``take`` is called for each bucket, and may keep the tensors: each bucket has its own memory.

    ``take`` is first called when the first bucket is there: if the sender never comes, nothing has happened. Returns
    when all buckets were taken and the checksum is the sender's. Raises :class:`WeightSyncError` or
    :class:`DeadlineError`, also for what ``take`` raised, and then the channel is closed.
    """
    channel.begin_update()
    name = f"weights v{version}"
    try:
        buckets = plan_buckets(meta, bucket_bytes)
        own = fingerprint(version, meta, bucket_bytes)
        theirs = channel.meet(f"{name}, begin", own)[0]
        if theirs != own:
            raise WeightSyncError(f"{name}, begin: the sender has plan {theirs}, this receiver {own}")
        started = time.monotonic()
        checksum = Checksum(channel.device)
        for i, bucket in enumerate(buckets):
            buffer_U = torch.empty(bucket.n_bytes, dtype=torch.uint8, device=channel.device)
            phase = f"{name}, bucket {i + 1} of {len(buckets)}"
            channel.meet(phase)
            channel.finish(channel.broadcast(buffer_U), phase)
            checksum.add(buffer_U)
            take(views(bucket, buffer_U))
        value = checksum.value()
        sent = channel.meet(f"{name}, confirm", value)[0]
        if value != sent:
            raise WeightSyncError(f"{name}, confirm: checksum {value} was received, but {sent} was sent: it is void")
    except GkdError as error:
        channel.abandon(str(error))
        raise
    except Exception as error:  # noqa: BLE001 - raised again, and told to the sender
        channel.fail(f"{name}, load", error)
    return TransferStats(
        version=version,
        seconds=time.monotonic() - started,
        n_bytes=sum(bucket.n_bytes for bucket in buckets),
        n_buckets=len(buckets),
        checksum=value,
    )
