"""Checksums of tensors on their own device, to compare the same memory before and after a sleep.

Imports torch on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_WORDS = 1 << 20
"""Words of a tensor that are converted at a time. A chunk needs up to 32 MiB."""


def tensor_checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of the bytes of each tensor. The bytes are not copied to the host.

    The checksum is ``sum((2 i + 1) * word_i)`` modulo 2**64. The weights are odd, so a change of one word always
    changes it, and they differ, so the order of the words counts. Integer sums do not depend on the order of additions.

    Args:
        tensors: Name -> tensor of any shape and data type.
    """
    import torch

    with torch.no_grad():
        sums = {name: _checksum(tensor) for name, tensor in tensors.items() if tensor.numel()}
        first = next(iter(sums.values()), torch.empty(0))
        values = torch.stack([each.to(first.device) for each in sums.values()]).tolist() if sums else []
    return dict.fromkeys(tensors, 0) | dict(zip(sums, values, strict=True))


def _checksum(tensor: Tensor) -> Tensor:
    import torch

    words_N = _words(tensor)
    odd_N = torch.arange(min(_CHUNK_WORDS, len(words_N)), device=tensor.device).mul_(2).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words_N), _CHUNK_WORDS):
        chunk_N = words_N[start : start + _CHUNK_WORDS].to(torch.int64)
        total += chunk_N.sum() * (2 * start) + (chunk_N * odd_N[: len(chunk_N)]).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as int32 words, or as single bytes if words are not aligned."""
    import torch

    bytes_N = tensor.detach().contiguous().view(-1).view(torch.uint8)
    is_aligned = bytes_N.numel() % 4 == 0 and bytes_N.storage_offset() % 4 == 0
    return bytes_N.view(torch.int32) if is_aligned else bytes_N
