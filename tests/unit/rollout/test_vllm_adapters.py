"""Adapters that an engine's model has no layers for, or other layers than the folder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recipe_gkd.errors import WeightSyncError
from tests._support.errors import raises

RANK, HIDDEN = 2, 3
GATE_UP = "model.layers.0.mlp.gate_up_proj"


@pytest.fixture
def adapters() -> Any:
    """Return the module, which imports vLLM."""
    from recipe_gkd.rollout.vllm import adapters

    return adapters


def make_model() -> Any:
    """Return what an adapter needs of a model in vLLM: an attention layer, and a joined layer of 4 + 5 rows."""
    gate_up = nn.Linear(HIDDEN, 9)
    manager = SimpleNamespace(
        model=nn.Module(),
        modules={
            "model.layers.0.self_attn.o_proj": SimpleNamespace(base_layer=nn.Linear(HIDDEN, HIDDEN)),
            GATE_UP: SimpleNamespace(base_layer=gate_up),
        },
        packed_modules={GATE_UP: ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]},
        lora_config=SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=4),
    )
    gate_up.output_sizes = [4, 5]  # type: ignore[assignment]
    model = nn.Module()
    model.lora_manager = manager  # type: ignore[assignment]
    return model


def make_factors(layer: str, n_outputs: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    prefix = f"base_model.model.model.layers.0.{layer}"
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, HIDDEN),
        f"{prefix}.lora_B.weight": torch.randn(n_outputs, rank),
    }


def test_factors_of_joined_layer_are_divided(adapters: Any) -> None:
    """The product of the factors of each part is a part of the product of the joined ones."""
    factors = make_factors("mlp.gate_up_proj", 9)
    a, b = factors.values()
    loras = adapters._to_vllm(make_model(), factors).loras
    assert list(loras) == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    parts = [lora.lora_b @ lora.lora_a for lora in loras.values()]
    assert [len(part) for part in parts] == [4, 5]
    torch.testing.assert_close(torch.cat(parts), b @ a)


def test_factors_of_a_weight_that_vllm_stores_twice_are_repeated(adapters: Any) -> None:
    """Some layers of Gemma 4 compute keys and values with one weight."""
    model = make_model()
    model.model = nn.Module()
    twice = {"layers.0.self_attn.k_proj.": ("layers.0.self_attn.qkv_proj.", ["k", "v"])}
    once = {"layers.0.self_attn.q_proj.": ("layers.0.self_attn.qkv_proj.", "q")}
    model.model.hf_to_vllm_mapper = SimpleNamespace(orig_to_new_stacked=once | twice)
    factors = make_factors("self_attn.q_proj", 4) | make_factors("self_attn.k_proj", 2)
    loras = adapters._to_vllm(model, factors).loras
    assert set(loras) == {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    key, value = (loras[f"model.layers.0.self_attn.{name}_proj"] for name in "kv")
    assert torch.equal(key.lora_a, value.lora_a) and torch.equal(key.lora_b, value.lora_b)


def test_adapter_without_layer_is_refused_by_name(adapters: Any) -> None:
    factors = make_factors("self_attn.o_proj", 3) | make_factors("mlp.experts_proj", 3)
    with raises(WeightSyncError, tensors=("model.layers.0.mlp.experts_proj",)):
        adapters.ReceivedAdapter().replace(make_model(), factors.items())


def test_adapter_with_higher_rank_than_the_buffers_is_refused(adapters: Any) -> None:
    with pytest.raises(WeightSyncError, match=r"rank 5.*4"):
        adapters.ReceivedAdapter().replace(make_model(), make_factors("self_attn.o_proj", 3, rank=5).items())
