"""Return of freed memory that lies between blocks in use."""

from __future__ import annotations

import ctypes

import psutil
import pytest

from teacher.common import memory_trim
from teacher.common.memory_trim import MemoryTrimmer

N_BLOCKS, BLOCK_BYTES = 2000, 100_000


def test_trim_if_due_returns_memory_between_blocks_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(N_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[::2]:
        libc.free(block)
    process, trimmer = psutil.Process(), MemoryTrimmer()
    assert not trimmer.trim_if_due()
    before = process.memory_info().rss
    monkeypatch.setattr(memory_trim, "TRIM_EVERY_S", 0.0)
    assert trimmer.trim_if_due()
    assert before - process.memory_info().rss > N_BLOCKS * BLOCK_BYTES / 4
    for block in blocks[1::2]:
        libc.free(block)
