"""Comparison of a checkpoint's model with the model to load it into."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_gkd.actor.megatron.checkpoint_load import check_same_dims
from recipe_gkd.actor.megatron.checkpoint_state import restore_rng, rng_state
from recipe_gkd.actor.megatron.model_dims import ModelDims, Rope
from recipe_gkd.actor.student_dims import MoEConfig
from recipe_gkd.errors import CheckpointMismatch
from tests._support.errors import raises
from tests.unit.actor.test_parallel_layout import ONE_RANK

DIMS = ModelDims(
    family="qwen3_moe", layers=2, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab_size=96, tied=False,
    qkv_bias=False, qk_norm="head", norm_eps=1e-6, max_positions=64, ropes=(Rope(width=4, theta=1e4),),
    moe=MoEConfig(layers=(True, True), experts=4, top_k=2, ffn=8, normalized=True, shared_ffn=None),
)  # fmt: skip
CHECKPOINT = Path("step_8")


def saved_dims() -> dict[str, Any]:
    return dataclasses.asdict(DIMS)


class TestCheckSameDims:
    def test_renamed_field_of_earlier_version_is_compared(self) -> None:
        saved = saved_dims()
        saved["mixture"] = saved.pop("moe")
        check_same_dims(CHECKPOINT, saved, DIMS)
        saved["mixture"] = None
        with raises(CheckpointMismatch, differing=("moe",), path=CHECKPOINT):
            check_same_dims(CHECKPOINT, saved, DIMS)

    def test_unknown_field_of_newer_version_raises(self) -> None:
        with raises(CheckpointMismatch, differing=("sliding_window",), path=CHECKPOINT):
            check_same_dims(CHECKPOINT, saved_dims() | {"sliding_window": 64}, DIMS)

    def test_different_value_raises(self) -> None:
        with raises(CheckpointMismatch, differing=("layers",), path=CHECKPOINT):
            check_same_dims(CHECKPOINT, saved_dims() | {"layers": 3}, DIMS)


class TestRestoreRng:
    def test_states_are_restored_on_the_same_kind_of_device_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = {"cuda": torch.zeros(16, dtype=torch.uint8)}
        with torch.random.fork_rng(devices=[]):
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
            states = rng_state(ONE_RANK).data
            torch.rand(1)
            moved = torch.get_rng_state()
            restore_rng(states | gpu)
            assert torch.equal(torch.get_rng_state(), moved)
            restore_rng(states)
            assert torch.equal(torch.get_rng_state(), states["torch"]) and not torch.equal(states["torch"], moved)
            torch.set_rng_state(moved)
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            restore_rng(states)
            assert torch.equal(torch.get_rng_state(), moved)
