"""How tensors lie in buckets: planned from their names, shapes and dtypes alone, so that both ends plan the same."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
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

    @property
    def is_one_tensor(self) -> bool:
        """Whether its bytes are those of one tensor, so that they need not be packed."""
        return len(self.slots) == 1 and self.slots[0].n_bytes == self.n_bytes


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


class Plan:
    """The buckets of one ``meta``; what making them costs at each update would be felt with thousands of tensors."""

    def __init__(self, meta: Sequence[TensorMeta], bucket_bytes: int) -> None:
        self._of = list(meta), bucket_bytes
        self.buckets = plan_buckets(meta, bucket_bytes)
        self.n_bytes = sum(bucket.n_bytes for bucket in self.buckets)
        record = json.dumps([bucket_bytes, [[name, list(shape), dtype] for name, shape, dtype in meta]])
        self._digest = hashlib.blake2b(record.encode(), digest_size=12).hexdigest()

    def is_of(self, meta: Sequence[TensorMeta], bucket_bytes: int) -> bool:
        return self._of == (meta, bucket_bytes)

    def fingerprint(self, version: int) -> str:
        """Equal on both ends exactly when they are about to do the same update in the same buckets."""
        return f"v{version}-{self._digest}"


@torch.no_grad()
def pack(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]], buffer_U: torch.Tensor) -> None:
    """Take the tensors of ``bucket``, and copy each bit by bit to its place in ``buffer_U`` (uint8 of its size).

    Raises :class:`WeightSyncError` when a name, shape or dtype is not the planned one: nothing is ever converted on
    the way.
    """
    typed = _typed(bucket, buffer_U)
    for slot in bucket.slots:
        tensor = _take(slot, tensors)
        # One call instead of a slice and a view: with small tensors, calls are what packing costs.
        place = torch.as_strided(typed[slot.dtype], slot.shape, tensor.stride(), slot.offset // slot.dtype.itemsize)
        place.copy_(tensor, non_blocking=True)
        if padding := -slot.n_bytes % ALIGNMENT:
            buffer_U.narrow(0, slot.offset + slot.n_bytes, padding).zero_()


@torch.no_grad()
def in_place(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Take the tensor that is all of ``bucket``: its own memory as bytes, or that of a copy if it is not aligned.

    Raises as :func:`pack` does.
    """
    tensor = _take(bucket.slots[0], tensors)
    if tensor.storage_offset() * tensor.itemsize % ALIGNMENT:
        tensor = tensor.clone()
    return tensor.view(-1).view(torch.uint8)


def _take(slot: Slot, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The next tensor, contiguous, if it is the one that belongs there."""
    name, tensor = next(tensors, (None, None))
    if name is None or tensor is None:
        raise WeightSyncError(f"the actor's export ended where {slot.name} was due; weights_meta() announced it")
    if name != slot.name:
        raise WeightSyncError(f"the actor exported {name} where {slot.name} was due; keep the order of weights_meta()")
    if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
        raise WeightSyncError(
            f"{slot.name} was exported as {tuple(tensor.shape)} {tensor.dtype}, but announced as {slot.shape} "
            f"{slot.dtype}; weights_meta() and export_weights() of the actor must agree"
        )
    return tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()


def views(bucket: Bucket, buffer_U: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of a received bucket, sharing its memory."""
    typed = _typed(bucket, buffer_U)
    return [
        (
            slot.name,
            typed[slot.dtype]
            .narrow(0, slot.offset // slot.dtype.itemsize, slot.n_bytes // slot.dtype.itemsize)
            .view(slot.shape),
        )
        for slot in bucket.slots
    ]


def _typed(bucket: Bucket, buffer_U: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: buffer_U.view(dtype) for dtype in {slot.dtype for slot in bucket.slots}}


class Checksum:
    """Of the bytes of an update, bucket after bucket: a polynomial in the int64 sums of the buckets, modulo 2^64.

    The transport is reliable, so what this guards against are our own mistakes: a buffer overwritten while it is still
    being sent, a bucket lost, repeated or out of order. A sum finds those, runs at memory speed (on 2 cores 64 MiB take
    2 ms; crc32 takes 13), runs on the device where the bucket is, and costs no synchronization before the end.
    """

    _FACTOR = 1_000_003  # any odd number: makes the order of the buckets count

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, buffer_U: torch.Tensor) -> None:
        self._sum = self._sum * self._FACTOR + buffer_U.view(torch.int64).sum()

    def value(self) -> str:
        """16 hexadecimal digits; waits for the device."""
        return f"{int(self._sum) & (2**64 - 1):016x}"
