"""Tensors in memory that is reserved and not used, for offsets that need tens of GB."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

_MAP_NORESERVE = 0x4000  # Python 3.13 has the constant
_MAX_USED_BYTES = 1 << 27


class AddressSpaceError(Exception):
    """The kernel refused to reserve the addresses."""


def sparse_tensor(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros, of which only the pages that a test touches use memory.

    As many addresses as the tensor has follow and precede it, so that a wrong offset in this range reads zeros, and
    the test fails on its results.

    Args:
        shape: Shape of the tensor.
        strides: Strides in elements; large ones leave a gap.
        dtype: Data type.

    Raises:
        AddressSpaceError: The system allows no such reservation: a limit of addresses, or overcommit mode 2.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    n_bytes = 3 * span * dtype.itemsize
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, n_bytes, flags=flags)
    except OSError as error:
        raise AddressSpaceError(f"cannot reserve {n_bytes / 1e9:.0f} GB of addresses: {error}") from error
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, span)


@contextmanager
def little_memory_used() -> Iterator[None]:
    """Check that this process uses hardly more memory at the end of the block."""
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    used = process.memory_info().rss - before
    assert used < _MAX_USED_BYTES, f"the test used {used / 1e6:.0f} MB of memory"


def run_or_skip(run: Callable[..., Any], job: Callable[..., Any], *args: Any) -> None:
    """Run a job with :func:`sparse_tensor` in another process. Skip the test if the addresses are refused."""
    try:
        run(job, *args)
    except AddressSpaceError as error:
        pytest.skip(str(error))
