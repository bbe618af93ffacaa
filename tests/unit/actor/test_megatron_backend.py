"""Set-up of the Megatron backend: no work that a checkpoint undoes; cached memory of a GPU is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from recipe_gkd.actor.megatron import backend
from recipe_gkd.actor.ranks import RankSpec
from tests._support.tiny_models import make_config


@pytest.mark.parametrize(("device", "calls"), [("cuda", ["build", "empty_cache"]), ("cpu", ["build"])])
def test_setup_releases_cached_memory_of_a_gpu_after_loading(
    device: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def build(*_: Any, **__: Any) -> Any:
        made.append("build")
        return mock.MagicMock()

    monkeypatch.setattr(backend, "build_megatron_model", build)
    for name in ("patches", "tensor_group", "context_group"):
        monkeypatch.setattr(backend, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty_cache"))
    spec = RankSpec(rank=0, world_size=1, local_rank=0, device=device, rendezvous=mock.MagicMock())
    backend.MegatronBackend(make_config(Path("unused")), spec)
    assert made == calls
