"""Tests of the adapters that an engine gets: buffers, layers, and refused settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe_gkd.errors import ConfigError
from recipe_gkd.rollout.adapters import AdapterOptions, adapter_options
from recipe_gkd.rollout.engine_factory import adapter_arguments
from recipe_gkd.rollout.engine_options import EngineOptions
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.rollout_models import make_model

LORA = "actor_rollout_ref.actor.lora"
ADAPTER = f"{LORA}.sync=adapter"
SHAPES = {
    "model.embed_tokens.weight": (96, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.mlp.gate.weight": (4, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (8, 8),
    "model.layers.0.mlp.shared_expert_gate.weight": (1, 8),
    "lm_head.weight": (96, 8),
}


@pytest.mark.parametrize(("rank", "buffer_rank"), [(1, 1), (6, 8), (8, 8), (257, 320), (512, 512)])
def test_buffers_have_the_next_size_of_vllm(rank: int, buffer_rank: int) -> None:
    options = adapter_options(base_config(f"{LORA}.rank={rank}", ADAPTER), SHAPES)
    assert options.buffer_rank == buffer_rank


def test_layers_are_the_adapted_ones_under_all_names_of_vllm() -> None:
    every = adapter_options(base_config(f"{LORA}.rank=4", ADAPTER), SHAPES)
    named = adapter_options(base_config(f"{LORA}.rank=4", ADAPTER, f"{LORA}.target_modules=[self_attn.q_proj]"), SHAPES)
    assert every == AdapterOptions(8, ("expert_gate", "q_proj", "shared_expert_gate"))
    assert named == AdapterOptions(8, ("q_proj",))


@pytest.mark.parametrize("overrides", [(), (f"{LORA}.rank=4",), (f"{LORA}.rank=4", f"{LORA}.sync=merged")])
def test_engine_that_gets_merged_weights_has_no_adapters(overrides: tuple[str, ...]) -> None:
    assert EngineOptions.from_config(base_config(*overrides), "cpu").adapters is None


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ((f"{LORA}.rank=513",), (f"{LORA}.sync", f"{LORA}.rank")),
        (
            (f"{LORA}.rank=4", "actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync"),
            (f"{LORA}.sync", "actor_rollout_ref.rollout.sleep_level"),
        ),
    ],
    ids=["rank", "sleep"],
)
def test_settings_without_adapters_of_vllm_are_refused(overrides: tuple[str, ...], keys: tuple[str, ...]) -> None:
    with raises(ConfigError, keys=keys):
        base_config(ADAPTER, *overrides)


def test_float32_on_a_gpu_is_refused(tmp_path: Path) -> None:
    make_model(0, tied=True).save_pretrained(tmp_path)
    config = base_config(
        f"actor_rollout_ref.model.path={tmp_path}", f"{LORA}.rank=4", ADAPTER, "actor_rollout_ref.rollout.dtype=float32"
    )
    with raises(ConfigError, keys=(f"{LORA}.sync", "actor_rollout_ref.rollout.dtype")):
        adapter_arguments(EngineOptions.from_config(config, "cuda"))
    assert adapter_arguments(EngineOptions.from_config(config, "cpu"))["max_lora_rank"] == 8
