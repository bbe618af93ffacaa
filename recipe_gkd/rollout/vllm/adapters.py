"""Adapters in a vLLM engine, on one tensor-parallel rank: received factors instead of a folder of peft.

vLLM has buffers for the adapter of each layer, which CUDA graphs read. An adapter is added by copying its factors into
them, and replaced the same way.

Shape suffixes: R rank, O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from recipe_gkd.config.keys import LORA
from recipe_gkd.errors import WeightSyncError
from recipe_gkd.rollout.adapters import SYNC
from recipe_gkd.rollout.vllm.compat import LoRALayerWeights, LoRAModel, LoRAModelManager, LoRARequest, PEFTHelper
from recipe_gkd.weight_sync.receiver import NamedTensors

ADAPTER_ID = 1
_MAX_SHOWN_NAMES = 3


def adapter_request() -> LoRARequest:
    """Return the name of the adapter for a request. vLLM never reads its folder, because the adapter is in memory."""
    return LoRARequest("student", ADAPTER_ID, lora_path="received from the actor")


class ReceivedAdapter:
    """The adapter of an engine. It starts empty, so that the model computes the weights of its folder.

    Lifecycle::

        adapter = ReceivedAdapter()
        adapter.activate(model)                  # once the engine is built
        adapter.replace(model, factors)          # checks, and keeps a copy
        adapter.activate(model)                  # after each end of a weight update, because vLLM removes it there
    """

    def __init__(self) -> None:
        self._factors: dict[str, torch.Tensor] = {}

    def replace(self, model: torch.nn.Module, factors: NamedTensors) -> None:
        """Keep a copy of other factors. :meth:`activate` makes the model compute with them.

        Args:
            factors: Complete factors of all layers under peft's names. B is multiplied by alpha / rank.

        Raises:
            WeightSyncError: The engine has no layer for a factor, or its buffers have a lower rank.
        """
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in factors}
        lora = _to_vllm(model, kept)
        _check_layers(_manager(model), lora)
        self._factors = kept

    def activate(self, model: torch.nn.Module) -> None:
        """Make the model compute with the factors of :meth:`replace`. Effective from its next step on."""
        manager = _manager(model)
        manager.remove_adapter(ADAPTER_ID)
        # vLLM's "dummy" adapter consists of zeros. It refuses an adapter without layers.
        empty = None if self._factors else manager.create_dummy_lora(ADAPTER_ID, 1, manager.model.embedding_modules)
        manager.add_adapter(empty or _to_vllm(model, self._factors))
        manager.activate_adapter(ADAPTER_ID)


def _manager(model: torch.nn.Module) -> LoRAModelManager:
    return cast(LoRAModelManager, model.lora_manager)  # set by vLLM, no submodule


def _to_vllm(model: torch.nn.Module, factors: dict[str, torch.Tensor]) -> LoRAModel:
    manager = _manager(model)
    rank = max((tensor.shape[0] for name, tensor in factors.items() if name.endswith(".lora_A.weight")), default=1)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        factors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=cast(torch.dtype, manager.lora_config.lora_dtype),  # vLLM has resolved "auto"
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    for name, parts in manager.packed_modules.items():
        if (joined := lora.loras.pop(name, None)) is not None:
            lora.loras |= _split(joined, parts, manager.modules[name].base_layer.output_sizes)
    for name, others in _repeated_parts(model):
        if (single := lora.loras.get(name)) is not None:
            lora.loras |= _repeat(single, others)
    return lora


def _repeated_parts(model: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield parts of joined layers whose stored weight vLLM loads into other parts too, and the names of those.

    Gemma 4 has layers whose values are their keys: vLLM stores the weight of ``k_proj`` twice.
    """
    for module_name, module in model.named_modules():
        mapper = getattr(module, "hf_to_vllm_mapper", None)
        for source, (_, shards) in (mapper.orig_to_new_stacked if mapper else {}).items():
            if isinstance(shards, list):
                layer, _, part = f"{module_name}.{source}".rstrip(".").rpartition(".")
                parts = [f"{shard}_proj" for shard in shards]
                yield f"{layer}.{part}", [f"{layer}.{other}" for other in parts if other != part]


def _repeat(single: LoRALayerWeights, names: Sequence[str]) -> dict[str, LoRALayerWeights]:
    """Return the factors of a layer under other names."""
    return {
        name: LoRALayerWeights(name, single.rank, single.lora_alpha, single.lora_a, single.lora_b) for name in names
    }


def _split(joined: LoRALayerWeights, parts: Sequence[str], sizes: Sequence[int]) -> dict[str, LoRALayerWeights]:
    """Return the factors of a layer that the folder joins, and for which vLLM expects those of its parts.

    Args:
        joined: Factors of the layer.
        parts: Names of the parts.
        sizes: Number of outputs of each part.
    """
    return {
        part: LoRALayerWeights(part, joined.rank, joined.lora_alpha, joined.lora_a, b_OR)
        for part, b_OR in zip(parts, joined.lora_b.split(tuple(sizes)), strict=True)
    }


def _check_layers(manager: LoRAModelManager, lora: LoRAModel) -> None:
    """Check that the model has a layer for each factor, and computes with it. vLLM ignores factors without one."""
    packed = {part for parts in manager.packed_modules.values() for part in parts}
    known = packed | (manager.modules.keys() - manager.packed_modules.keys())
    adapted = {id(layer.base_layer) for layer in manager.modules.values()}
    bypassed = {
        name
        for name, module in manager.model.named_modules(remove_duplicate=False)
        if id(module) in adapted and not name.endswith(".base_layer")
    }
    # Latent attention computes with the weight of kv_b_proj, which the backend of its attention has.
    backends = [part.impl for part in manager.model.modules() if hasattr(part, "impl")]
    inner = {id(value) for backend in backends for value in vars(backend).values()}
    bypassed |= {name for name, layer in manager.modules.items() if id(layer.base_layer) in inner} & lora.loras.keys()
    if unknown := sorted(lora.loras.keys() - known | bypassed):
        raise WeightSyncError(
            f"vLLM cannot add adapters to {len(unknown)} layers of {type(manager.model).__name__}, such as "
            f"{', '.join(unknown[:_MAX_SHOWN_NAMES])}",
            remedy=f"set {SYNC}=merged, or name other layers in {LORA}.target_modules",
            tensors=tuple(unknown),
        )
    if lora.rank > manager.lora_config.max_lora_rank:
        raise WeightSyncError(
            f"the adapters have rank {lora.rank}, and the engine's buffers {manager.lora_config.max_lora_rank}",
            remedy=f"set the same {LORA}.rank for both pools",
        )
