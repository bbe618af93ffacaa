"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) on linear layers, with the layers of peft.

Shape suffixes: R rank, I inputs, O outputs of a layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_gkd.actor import lora
from recipe_gkd.actor.fsdp.local_rows import local_rows
from recipe_gkd.actor.peft_patches import is_converted, unconverted_targets
from recipe_gkd.config.keys import LORA
from recipe_gkd.config.schema import LoraConfig
from recipe_gkd.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name of the only adapter of a layer, as in peft."""


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Add adapters to a model, and freeze all its other parameters. See :func:`initialize_adapters`.

    Args:
        model: Model of transformers, not sharded, with or without data.
        config: Rank and target layers.

    Raises:
        ConfigError: ``target_modules`` has a name that no linear layer of the model has, or peft refuses a layer.
    """
    import peft

    layers = target_layers(model, config.target_modules)
    options = lora.peft_options(config, layers)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]), device, warnings.catch_warnings(), unconverted_targets():
        warnings.simplefilter("ignore")  # peft corrects the orientation of GPT-2's weights, with a warning
        try:
            peft.inject_adapter_in_model(options, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(
                f"peft cannot add adapters to {type(model).__name__}: {error}",
                remedy=f"name other layers in {LORA}.target_modules",
                keys=(f"{LORA}.target_modules",),
            ) from error


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Fill this rank's rows of new adapters with values that do not change the model.

    Args:
        model: Model with adapters, sharded or not.
        seed: Seed of the factor that is not zero.
    """
    for name, layer in adapted_layers(model).items():
        a_RI, b_OR = (getattr(layer, factor)[ADAPTER].weight for factor in ("lora_A", "lora_B"))
        rows, first = local_rows(a_RI)
        rank, n_inputs = a_RI.shape
        rows.copy_(lora.initial_factor(name, rank, n_inputs, seed)[first : first + len(rows)])
        local_rows(b_OR)[0].zero_()


def target_layers(model: PreTrainedModel, names: Sequence[str] | None) -> list[str]:
    """Return the complete names of the layers that get an adapter.

    Args:
        model: Model of transformers.
        names: Last parts of names; None for all linear layers except the output layer.

    Raises:
        ConfigError: No linear layer has one of ``names``.
    """
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    linear = [
        name
        for name, part in model.named_modules()
        if isinstance(part, (nn.Linear, Conv1D)) and part is not output
    ]  # fmt: skip
    return lora.select_layers(linear, names, type(model).__name__)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by name. ``base_layer`` of each is the model's own layer."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers under their names in the model without adapters.

    Adapters are not included, and weights are not merged.
    """
    layers = adapted_layers(model)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        layer, _, rest = name.partition(".base_layer.")
        if rest and layer in layers:
            state[f"{layer}.{rest}"] = tensor
        elif name.partition(".lora_")[0] not in layers:
            state[name] = tensor
    return state


def layers_by_weight(model: nn.Module) -> dict[int, Any]:
    """Return the layers with an adapter, by the id of the weight that it is merged with."""
    return {id(layer.base_layer.weight): layer for layer in adapted_layers(model).values()}


def merged_weight(layer: Any) -> Tensor:
    """Return the complete weight of a layer with its adapter, ``W + alpha / rank B A``, in float32. Collective."""
    factors = (layer.base_layer.weight, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
    weight, a_RI, b_OR = (_complete(factor).float() for factor in factors)
    delta_OI = b_OR @ a_RI * layer.scaling[ADAPTER]
    return weight + (delta_OI.T if layer.fan_in_fan_out else delta_OI)


def _complete(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapter_factors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the adapters with their names in a folder of peft."""
    for name, layer in adapted_layers(model).items():
        for factor in ("A", "B"):
            yield lora.factor_name(name, factor), getattr(layer, f"lora_{factor}")[ADAPTER].weight


@torch.no_grad()
def export_adapters(
    model: nn.Module, config: LoraConfig, dtype: torch.dtype, *, is_first_rank: bool
) -> Iterator[tuple[str, Tensor]]:
    """Gather the complete factors of the adapters, one at a time, for a weight sync. Collective.

    Args:
        model: Sharded model.
        config: Rank and scale of the adapters.
        dtype: Data type of the result.
        is_first_rank: True on rank 0.

    Yields:
        See :func:`recipe_gkd.actor.lora.synced_factors`, on rank 0; nothing on the other ranks, which must exhaust the
        iterator as well.
    """
    complete = ((name, _complete(factor)) for name, factor in adapter_factors(model))
    for name, factor in lora.synced_factors(complete, config, dtype):
        if is_first_rank:
            yield name, factor


def adapter_files(model: Any, base: str) -> dict[str, bytes]:
    """Return content by name of a folder that peft loads: the adapters in float32, not merged. Collective.

    The folder is empty without adapters, and if peft would load them on other layers.

    Args:
        model: Sharded model.
        base: Model folder, for the description.
    """
    layers = adapted_layers(model)
    if not layers or is_converted(model.peft_config[ADAPTER], model):
        return {}
    factors = {name: _complete(factor).cpu() for name, factor in adapter_factors(model)}
    return lora.adapter_files(model.peft_config[ADAPTER], factors, base)


@contextmanager
def adapter_dropout(model: nn.Module) -> Iterator[None]:
    """Enable the dropout of the adapters' inputs, and no other dropout, inside of this context."""
    parts = [layer.lora_dropout for layer in adapted_layers(model).values()]
    for part in parts:
        part.train()
    try:
        yield
    finally:
        for part in parts:
            part.eval()


def adapter_dims(model: nn.Module) -> dict[str, Any]:
    """Return the settings that a checkpoint of adapters must have; nothing for a model without adapters."""
    layers = list(adapted_layers(model).values())
    return {"lora_alpha": layers[0].lora_alpha[ADAPTER]} if layers else {}
