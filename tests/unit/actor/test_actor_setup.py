"""Set-up of the actor: memory that only the loading needed is released on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from recipe_gkd.actor import megatron_actor
from recipe_gkd.actor.megatron_actor import MegatronActor
from recipe_gkd.actor.parallel import RankSpec
from tests._support.tiny_models import make_config


@pytest.mark.parametrize(("device", "calls"), [("cuda", ["build", "empty_cache"]), ("cpu", ["build"])])
def test_setup_releases_cached_memory_of_a_gpu_after_loading(
    device: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def build(*_: Any) -> Any:
        made.append("build")
        return mock.MagicMock()

    monkeypatch.setattr(megatron_actor, "build_megatron_model", build)
    monkeypatch.setattr(megatron_actor, "megatron_patches", mock.MagicMock())
    monkeypatch.setattr(megatron_actor, "Updater", mock.MagicMock())
    monkeypatch.setattr(megatron_actor, "layer_report", lambda *_: SimpleNamespace(summary="", warnings=[]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    spec = RankSpec(rank=0, world_size=1, local_rank=0, device=device, rendezvous=mock.MagicMock())
    MegatronActor(make_config(Path("unused")), spec, total_steps=1).setup()
    assert made == calls
