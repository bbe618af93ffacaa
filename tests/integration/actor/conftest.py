from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._support.tiny_models import make_folder
from tests._support.worker_pool import WorkerPool

KINDS = ("qwen2", "qwen2_untied", "qwen3", "llama", "qwen3_moe", "qwen2_moe", "mixtral")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Return a pool of up to four processes that import Megatron once."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of tiny models with random weights, by kind."""
    base = tmp_path_factory.mktemp("models")
    return {kind: make_folder(base / kind, kind) for kind in KINDS}
