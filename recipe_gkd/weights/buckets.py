"""How tensors lie in buckets: planned from their names, shapes and dtypes alone, so that both ends plan the same."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recipe_gkd.errors import WeightSyncError

TensorMeta = tuple[str, tuple[int, ...], str]
"""Name, full shape, and the name of the torch dtype (`bfloat16`)."""

ALIGNMENT = 16
"""Bytes. Every tensor starts where a view of any dtype may start, and where a GPU copies with its widest loads."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    n_bytes: int
    """Without the padding up to the next slot."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    slots: tuple[Slot, ...]
    n_bytes: int
    """Exactly what the slots need, a multiple of :data:`ALIGNMENT`: a part-filled bucket is not sent at full size."""


def plan_buckets(meta: Sequence[TensorMeta], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets of at most ``bucket_bytes`` in the order of ``meta``; a tensor larger than that gets its own.

    A tensor is never split, because the rollout engine loads whole tensors. Raises :class:`WeightSyncError` for a dtype
    that torch does not have and for a name that occurs twice.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    seen: set[str] = set()
    for name, shape, dtype_name in meta:
        if name in seen:
            raise WeightSyncError(f"the actor lists the weight {name} twice; each name must be exported once")
        seen.add(name)
        dtype = _dtype(name, dtype_name)
        n_bytes = math.prod(shape) * dtype.itemsize
        padded = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        if slots and filled + padded > bucket_bytes:
            buckets.append(Bucket(slots=tuple(slots), n_bytes=filled))
            slots, filled = [], 0
        slots.append(Slot(name=name, shape=tuple(shape), dtype=dtype, offset=filled, n_bytes=n_bytes))
        filled += padded
    if slots:
        buckets.append(Bucket(slots=tuple(slots), n_bytes=filled))
    return buckets


def _dtype(name: str, dtype_name: str) -> torch.dtype:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"{name} has dtype {dtype_name!r}; expected a torch dtype's name, such as 'bfloat16'")
    return dtype


def pack(slot: Slot, tensor: torch.Tensor, buffer_U: torch.Tensor) -> None:
    """Copy ``tensor`` bit by bit to its place in ``buffer_U`` (uint8 of the bucket's size), and zero the padding.

    Raises :class:`WeightSyncError` when shape or dtype are not the planned ones: nothing is ever converted on the way.
    """
    if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
        raise WeightSyncError(
            f"{slot.name} was exported as {tuple(tensor.shape)} {tensor.dtype}, but announced as {slot.shape} "
            f"{slot.dtype}; weights_meta() and export_weights() of the actor must agree"
        )
    end = slot.offset + slot.n_bytes
    buffer_U[slot.offset : end].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8), non_blocking=True)
    buffer_U[end : end + -slot.n_bytes % ALIGNMENT].zero_()


def views(bucket: Bucket, buffer_U: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a received bucket, sharing its memory."""
    return [
        (slot.name, buffer_U[slot.offset : slot.offset + slot.n_bytes].view(slot.dtype).view(slot.shape))
        for slot in bucket.slots
    ]


def fingerprint(version: int, meta: Sequence[TensorMeta], bucket_bytes: int) -> str:
    """Equal on both ends exactly when they are about to do the same update in the same buckets."""
    record = json.dumps([version, bucket_bytes, [[name, list(shape), dtype] for name, shape, dtype in meta]])
    return f"v{version}-{hashlib.blake2b(record.encode(), digest_size=12).hexdigest()}"


class Checksum:
    """Of the bytes of an update, bucket after bucket: a polynomial in the int64 sums of the buckets, modulo 2^64.

    The transport is reliable, so what this guards against are our own mistakes: a buffer overwritten while it is still
    being sent, a bucket lost, repeated or out of order. A sum finds those, runs at memory speed (on 2 cores 64 MiB take
    2 ms; crc32 takes 13), runs on the device where the bucket is, and costs no synchronisation before the end.
    """

    _FACTOR = 1_000_003  # any odd number: makes the order of the buckets count

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, buffer_U: torch.Tensor) -> None:
        self._sum = self._sum * self._FACTOR + buffer_U.view(torch.int64).sum()

    def value(self) -> str:
        """16 hexadecimal digits; waits for the device."""
        return f"{int(self._sum) & (2**64 - 1):016x}"
