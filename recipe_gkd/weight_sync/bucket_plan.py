"""Layout of tensors in buckets. It follows from names, shapes and dtypes alone, so both ends compute the same plan."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from recipe_gkd.errors import WeightSyncError

TensorMeta = tuple[str, tuple[int, ...], str]
"""Name, full shape, and name of the torch dtype, for example ``"bfloat16"``."""

ALIGNMENT_BYTES = 16
"""Alignment of every tensor: enough for a view of any dtype, and for the widest loads of a GPU."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Position of one tensor in a bucket.

    Attributes:
        name: Hugging Face name of the tensor.
        shape: Full shape.
        dtype: Dtype of the tensor; it is never converted.
        offset: First byte in the bucket, a multiple of ``ALIGNMENT_BYTES``.
        n_bytes: Size of the tensor, without the padding before the next slot.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors that are transferred together.

    Attributes:
        slots: Positions of the tensors, in the order of the export.
        n_bytes: Size of the slots with padding, a multiple of ``ALIGNMENT_BYTES``. Only these bytes are transferred.
    """

    slots: tuple[Slot, ...]
    n_bytes: int

    @property
    def is_single_tensor(self) -> bool:
        """True if the bucket consists of the bytes of one tensor, without padding, so that it needs no packing."""
        return len(self.slots) == 1 and self.slots[0].n_bytes == self.n_bytes


def plan_buckets(meta: Sequence[TensorMeta], bucket_bytes: int) -> list[Bucket]:
    """Assign tensors to buckets in the order of ``meta``.

    A tensor is never split, because the rollout engine loads whole tensors.

    Args:
        meta: Tensors of one update.
        bucket_bytes: Maximum size of a bucket. A larger tensor gets its own bucket.

    Raises:
        WeightSyncError: A dtype is not a torch dtype, or a name occurs twice.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    seen: set[str] = set()
    for name, shape, dtype_name in meta:
        if name in seen:
            what = f"the actor lists the weight {name} twice"
            raise WeightSyncError(what, tensors=(name,), remedy="export each name once")
        seen.add(name)
        dtype = _parse_dtype(name, dtype_name)
        n_bytes = math.prod(shape) * dtype.itemsize
        padded = -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if slots and filled + padded > bucket_bytes:
            buckets.append(Bucket(slots=tuple(slots), n_bytes=filled))
            slots, filled = [], 0
        slots.append(Slot(name=name, shape=tuple(shape), dtype=dtype, offset=filled, n_bytes=n_bytes))
        filled += padded
    if slots:
        buckets.append(Bucket(slots=tuple(slots), n_bytes=filled))
    return buckets


def _parse_dtype(name: str, dtype_name: str) -> torch.dtype:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        what = f"{name} has dtype {dtype_name!r}, expected a torch dtype's name, such as 'bfloat16'"
        raise WeightSyncError(what, tensors=(name,))
    return dtype


class BucketPlan:
    """The buckets of one list of tensors. It is reused by later updates, because planning is slow for many tensors.

    Args:
        meta: Tensors of one update.
        bucket_bytes: Maximum size of a bucket.

    Attributes:
        buckets: Buckets in the order of transfer.
        n_bytes: Total size of the buckets.

    Raises:
        WeightSyncError: See :func:`plan_buckets`.
    """

    def __init__(self, meta: Sequence[TensorMeta], bucket_bytes: int) -> None:
        self._inputs = list(meta), bucket_bytes
        self.buckets = plan_buckets(meta, bucket_bytes)
        self.n_bytes = sum(bucket.n_bytes for bucket in self.buckets)
        record = json.dumps([bucket_bytes, [[name, list(shape), dtype] for name, shape, dtype in meta]])
        self._digest = hashlib.blake2b(record.encode(), digest_size=12).hexdigest()

    def matches(self, meta: Sequence[TensorMeta], bucket_bytes: int) -> bool:
        """Return True if this is the plan of ``meta`` and ``bucket_bytes``."""
        return self._inputs == (meta, bucket_bytes)

    def fingerprint(self, version: int) -> str:
        """Return a string that is equal on two ranks only if version, tensors and bucket size are equal."""
        return f"v{version}-{self._digest}"


@torch.no_grad()
def pack(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]], buffer_U: torch.Tensor) -> None:
    """Copy the next tensors of an export, bit by bit, to their slots in a buffer.

    Args:
        bucket: Bucket to fill; as many tensors are taken as it has slots.
        tensors: Export of the actor.
        buffer_U: Destination, uint8 [bucket.n_bytes].

    Raises:
        WeightSyncError: A name, shape or dtype differs from the plan. Tensors are never converted.
    """
    typed = _typed_views(bucket, buffer_U)
    # CUDA does not promise that a copy to pageable memory is complete when the call returns, unless it is synchronous.
    is_asynchronous = buffer_U.is_cuda
    for slot in bucket.slots:
        tensor = _take(slot, tensors)
        # One call instead of a slice and a view: with small tensors, the number of calls dominates the time.
        view = torch.as_strided(typed[slot.dtype], slot.shape, tensor.stride(), slot.offset // slot.dtype.itemsize)
        view.copy_(tensor, non_blocking=is_asynchronous)
        if padding := -slot.n_bytes % ALIGNMENT_BYTES:
            buffer_U.narrow(0, slot.offset + slot.n_bytes, padding).zero_()


@torch.no_grad()
def take_single_tensor(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Return the memory of the tensor that fills a bucket alone, without packing it.

    Args:
        bucket: Bucket of a single tensor.
        tensors: Export of the actor; one tensor is taken.

    Returns:
        The tensor's own memory, or a copy if that is not aligned, uint8 [bucket.n_bytes].

    Raises:
        WeightSyncError: Name, shape or dtype differs from the plan.
    """
    tensor = _take(bucket.slots[0], tensors)
    if tensor.storage_offset() * tensor.itemsize % ALIGNMENT_BYTES:
        tensor = tensor.clone()
    return tensor.view(-1).view(torch.uint8)


def _take(slot: Slot, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Return the next tensor of the export, contiguous, after comparing it with the plan."""
    name, tensor = next(tensors, (None, None))
    if name is None or tensor is None:
        raise WeightSyncError(
            f"the actor's export ended before {slot.name}",
            tensors=(slot.name,),
            remedy="export every tensor of weights_meta()",
        )
    if name != slot.name:
        what = f"the actor exported {name}, expected {slot.name}"
        raise WeightSyncError(what, tensors=(name, slot.name), remedy="keep the order of weights_meta()")
    if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
        raise WeightSyncError(
            f"{slot.name} was exported as {tuple(tensor.shape)} {tensor.dtype}, but announced as {slot.shape} "
            f"{slot.dtype}",
            tensors=(slot.name,),
            remedy="let weights_meta() and export_weights() of the actor agree",
        )
    return tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()


def unpack(bucket: Bucket, buffer_U: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors of a received bucket as views of its memory.

    Args:
        bucket: Bucket that was received.
        buffer_U: Its bytes, uint8 [bucket.n_bytes].
    """
    typed = _typed_views(bucket, buffer_U)
    return [
        (
            slot.name,
            typed[slot.dtype]
            .narrow(0, slot.offset // slot.dtype.itemsize, slot.n_bytes // slot.dtype.itemsize)
            .view(slot.shape),
        )
        for slot in bucket.slots
    ]


def _typed_views(bucket: Bucket, buffer_U: torch.Tensor) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: buffer_U.view(dtype) for dtype in {slot.dtype for slot in bucket.slots}}


class Checksum:
    """Checksum of an update: a polynomial in the int64 sums of its buckets, modulo 2^64.

    The transport is reliable, so the checksum guards against mistakes of this project: a buffer that is overwritten
    during its transfer, and a bucket that is lost, repeated or out of order. A sum detects those, runs at memory speed
    (64 MiB take 2 ms on 2 cores, with crc32 13 ms), runs on the bucket's device, and does not synchronize before the
    end.

    Args:
        device: Device of the buckets.
    """

    _FACTOR = 1_000_003  # any odd number: makes the value depend on the order of the buckets

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, buffer_U: torch.Tensor) -> None:
        """Include the next bucket, uint8 [U]; U is a multiple of 8."""
        self._sum = self._sum * self._FACTOR + buffer_U.view(torch.int64).sum()

    def value(self) -> str:
        """Return the checksum as 16 hexadecimal digits. Waits for the device."""
        return f"{int(self._sum) & (2**64 - 1):016x}"
