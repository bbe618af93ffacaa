"""Adapters of a rollout engine: the size of vLLM's buffers for them, and the layers that get one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recipe_gkd.config import Config
from recipe_gkd.config.actor_layout import ADAPTER_RANKS
from recipe_gkd.config.keys import LORA

_NOT_ADAPTED = ("embed_tokens", "wte", "lm_head", "gate", "router")
"""Last parts of the names of matrices without an adapter: embedding, output layer, router of a mixture of experts."""
_ALIASES = {"shared_expert_gate": ("expert_gate",)}
"""Other names of a layer in a model of vLLM, which computes with it under this name (``models/qwen2_moe.py``)."""
SYNC = f"{LORA}.sync"


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters that an engine gets from the actor.

    Attributes:
        buffer_rank: Rank of vLLM's buffers, at least the rank of the adapters.
        layers: Last parts of the names of the layers that may have an adapter.
    """

    buffer_rank: int
    layers: tuple[str, ...]


def adapter_options(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> AdapterOptions:
    """Return the adapters of a run whose weight syncs transfer adapters.

    Args:
        shapes: Shapes of the tensors in the model folder, by name.
    """
    lora = config.actor_rollout_ref.actor.lora
    layers = {name.rpartition(".")[2] for name in lora.target_modules or linear_layers(shapes)}
    layers.update(*(_ALIASES.get(name, ()) for name in layers))
    buffer_rank = next(size for size in ADAPTER_RANKS if size >= (lora.rank or 0))
    return AdapterOptions(buffer_rank, tuple(sorted(layers)))


def linear_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of the layers of a model folder that the actor adapts by default."""
    layers = (name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2)
    return [name for name in layers if ".experts." not in name and name.rpartition(".")[2] not in _NOT_ADAPTED]
