"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): what both training backends have in common.

Adapters are described as peft does, by the names of the layers of transformers. The same seed gives the same initial
adapters with each backend and on each parallel layout.

Shape suffixes: R rank, I inputs of a layer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from torch import Tensor

from recipe_gkd.config.keys import LORA
from recipe_gkd.config.schema import LoraConfig
from recipe_gkd.errors import ConfigError

if TYPE_CHECKING:
    import peft


def select_layers(linear: Sequence[str], names: Sequence[str] | None, model: str) -> list[str]:
    """Return the complete names of the layers that get an adapter.

    Args:
        linear: Complete names of the linear layers of a model, without its output layer.
        names: Last parts of names; None for all layers.
        model: Name of the model, for the error.

    Raises:
        ConfigError: No layer has one of ``names``.
    """
    if names is None:
        return list(linear)
    ending = {name: [each for each in linear if f".{each}".endswith(f".{name}")] for name in names}
    if unknown := [name for name, found in ending.items() if not found]:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"{LORA}.target_modules={list(names)}: {model} has no linear layer {' or '.join(unknown)}, apart from the "
            "output layer and experts, which cannot have an adapter",
            remedy=f"its linear layers are {', '.join(known)}",
            keys=(f"{LORA}.target_modules",),
        )
    return [each for each in linear if any(each in found for found in ending.values())]


def initial_factor(layer: str, rank: int, n_inputs: int, seed: int) -> Tensor:
    """Return the initial values of the factor A of an adapter, float32 [R, I], from peft's distribution.

    The factor B is zero, so that a new adapter does not change the model.

    Args:
        layer: Complete name of the layer. Each layer has its own random numbers.
        seed: Seed of the run.
    """
    digest = hashlib.sha256(f"{seed} {layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.nn.init.kaiming_uniform_(torch.empty(rank, n_inputs), a=math.sqrt(5), generator=generator)


def peft_options(config: LoraConfig, layers: Sequence[str]) -> peft.LoraConfig:
    """Return peft's description of the adapters.

    Args:
        config: Rank, scale and dropout.
        layers: Complete names of the layers with an adapter.
    """
    import peft

    return peft.LoraConfig(
        r=config.rank or 0,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(layers),
        task_type="CAUSAL_LM",
    )


def factor_name(layer: str, factor: str) -> str:
    """Return the name of a factor, ``"A"`` or ``"B"``, in the folders of peft."""
    return f"base_model.model.{layer}.lora_{factor}.weight"


def synced_factors(
    factors: Iterable[tuple[str, Tensor]], config: LoraConfig, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield factors as a weight sync transfers them: the factors B are multiplied by the scale, alpha / rank.

    Args:
        factors: Complete factors with their :func:`factor_name`.
        config: Rank and scale.
        dtype: Data type of the result.
    """
    scale = config.alpha / (config.rank or 1)
    for name, factor in factors:
        yield name, (factor * scale if name.endswith(".lora_B.weight") else factor).to(dtype)


def adapter_files(options: peft.LoraConfig, factors: Mapping[str, Tensor], base: str) -> dict[str, bytes]:
    """Return content by name of a folder that peft loads: the adapters in float32, not merged.

    Args:
        options: Description of the adapters.
        factors: Complete factors by :func:`factor_name`.
        base: Model folder, for the description.
    """
    values = options.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    values["target_modules"] = sorted({_layer_of(name) for name in factors})
    tensors = {name: factor.detach().float().cpu().contiguous() for name, factor in factors.items()}
    return {
        "adapter_config.json": (json.dumps(values, indent=2) + "\n").encode(),
        "adapter_model.safetensors": safetensors.torch.save(tensors, metadata={"format": "pt"}),
    }


def _layer_of(name: str) -> str:
    return name.removeprefix("base_model.model.").rpartition(".lora_")[0]
