"""Refusals of ``rollout.routing_replay`` before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe_gkd.actor.routing_checks import KEY, OVERRIDE, check_routing_replay
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.errors import ConfigError
from tests._support.errors import raises
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.layouts import PP2
from tests._support.rollout_models import config_for

ON_GPU = ("trainer.device=cuda", f"{KEY}=true")
FSDP = "actor_rollout_ref.actor.strategy=fsdp"
MODEL = "actor_rollout_ref.model.path"
MOE_RECOMPUTED = (f"{OVERRIDE}.recompute_granularity=selective", f"{OVERRIDE}.recompute_modules=[moe]")
TWO_STAGES = (PP2, "trainer.n_gpus_per_node=2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: make_family_folder(base / name, BY_TYPE[name]) for name in ("qwen3", "qwen3_moe", "lfm2_moe")}


def check(folder: Path, *overrides: str) -> None:
    config = config_for(folder, *overrides)
    check_routing_replay(read_student_dims(folder, config), config)


@pytest.mark.parametrize(
    ("family", "overrides", "keys"),
    [
        ("qwen3_moe", (f"{KEY}=true",), (KEY, "trainer.device")),
        ("qwen3", ON_GPU, (KEY, MODEL)),
        ("qwen3", (*ON_GPU, FSDP), (KEY, MODEL)),
        ("lfm2_moe", (*ON_GPU, FSDP), (KEY, MODEL)),
        ("qwen3_moe", (*ON_GPU, f"{OVERRIDE}.moe_router_fusion=true"), (KEY, f"{OVERRIDE}.moe_router_fusion")),
        ("qwen3_moe", (*ON_GPU, *TWO_STAGES, *MOE_RECOMPUTED), (KEY, f"{OVERRIDE}.recompute_modules")),
    ],
    ids=["cpu", "dense", "dense, fsdp", "other family", "fused", "stages"],
)
def test_refusal_names_the_keys(
    family: str, overrides: tuple[str, ...], keys: tuple[str, ...], folders: dict[str, Path]
) -> None:
    with raises(ConfigError, keys=keys):
        check(folders[family], *overrides)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_moe", ON_GPU),
        ("qwen3_moe", (*ON_GPU, FSDP)),
        ("qwen3_moe", (*ON_GPU, *MOE_RECOMPUTED)),
        ("qwen3_moe", (*ON_GPU, *TWO_STAGES)),
        ("qwen3", ()),
    ],
)
def test_replay_is_accepted(family: str, overrides: tuple[str, ...], folders: dict[str, Path]) -> None:
    check(folders[family], *overrides)
