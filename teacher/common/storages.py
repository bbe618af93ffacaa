"""Storages of tensors: their bytes, and the distinct ones behind many tensors. Imports torch on use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def as_bytes(storage: Any) -> Any:
    """Return a tensor of all bytes of a storage, uint8 [U], which shares its memory."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: Any) -> list[Any]:
    """Return the storages of the tensors in nested lists. Tensors may share a storage, which is returned once."""
    storages: dict[int, Any] = {}
    for tensor in _flatten(tensors):
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, storage)
    return list(storages.values())


def _flatten(tensors: Any) -> Iterator[Any]:
    if isinstance(tensors, list | tuple):
        for item in tensors:
            yield from _flatten(item)
    else:
        yield tensors
