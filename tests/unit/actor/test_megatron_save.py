"""The copies of a Megatron checkpoint that its writers read are in memory of which a fork has its own view."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from recipe_gkd.actor.megatron.checkpoint_save import MegatronSave


def test_copies_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's writer copies to pinned memory unless it is told otherwise."""
    calls: list[dict[str, Any]] = []

    def tensor_to(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return tensor

    tensor = SimpleNamespace(to=tensor_to)
    save: Any = object.__new__(MegatronSave)
    save._path, save._is_first_rank = Path(), False
    save._writer = SimpleNamespace(
        write_buckets=[("file", "key", ([], [("item", tensor)]))], preload_tensors=FileSystemWriterAsync.preload_tensors
    )
    assert len(save.shard_functions()) == 1
    assert calls == [{"non_blocking": False}]
