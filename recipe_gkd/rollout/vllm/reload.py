"""Reload of the weights of a vLLM model, layer by layer, on one tensor-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recipe_gkd.errors import WeightSyncError
from recipe_gkd.rollout.vllm.compat import (
    detach_expert_kernels,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
    model_parameter_names,
    refresh_tied_heads,
    restore_expert_kernels,
    set_current_vllm_config,
)
from recipe_gkd.rollout.vllm.gpt_oss import keep_sinks_in_reloads, single_experts
from recipe_gkd.weight_sync.receiver import NamedTensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_MAX_SHOWN_NAMES = 3

keep_sinks_in_reloads()


class ModelReload:
    """One reload of a model: ``start``, any number of ``load``, ``finalize``, ``check_memory`` and ``check_complete``.

    Args:
        model: The model that vLLM runs.
        vllm_config: vLLM's configuration of this rank.
        model_config: vLLM's configuration of the model.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig, model_config: ModelConfig) -> None:
        self._model, self._vllm_config, self._model_config = model, vllm_config, model_config
        self._expected, self._loaded = model_parameter_names(model), set[str]()
        self._reported, self._lost = set[str](), set[str]()
        self._places = _places(model)
        self._expert_kernels: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Prepare the model. After this call it cannot generate until :meth:`finalize`."""
        self._expert_kernels = detach_expert_kernels(self._model)
        initialize_layerwise_reload(self._model)

    def load(self, tensors: NamedTensors) -> None:
        """Load full tensors under their Hugging Face names."""
        loaded = self._model.load_weights(single_experts(self._model, tensors))  # type: ignore[operator]
        self._loaded |= loaded if loaded is not None else self._expected
        self._reported |= loaded or set()

    def finalize(self) -> None:
        """Make the model usable, even if not all weights were loaded."""
        self._lost = self._reported & _without_loaded_numbers(self._model)
        with set_current_vllm_config(self._vllm_config):
            finalize_layerwise_reload(self._model, self._model_config)
            restore_expert_kernels(self._expert_kernels)
            refresh_tied_heads(self._model)

    def check_memory(self) -> None:
        """Check that :meth:`finalize` has left each parameter in the memory that it had before :meth:`start`.

        Raises:
            WeightSyncError: A parameter has no memory, or other memory. Captured CUDA graphs would go on to read the
                old memory, without an error.
        """
        places = _places(self._model)
        moved = sorted(name for name, place in self._places.items() if place is None or places.get(name) != place)
        if moved:
            raise WeightSyncError(
                f"{len(moved)} weights of the rollout engine are not in their memory after a reload, such as "
                f"{', '.join(moved[:_MAX_SHOWN_NAMES])}",
                tensors=tuple(moved),
            )

    def check_complete(self) -> None:
        """Raise :class:`WeightSyncError` if a parameter was not loaded, or loaded in a way that a reload loses."""
        if lost := sorted(self._lost):
            raise WeightSyncError(
                f"vLLM's {type(self._model).__name__} copies {len(lost)} weights into the model without their "
                f"weight_loader, such as {', '.join(lost[:_MAX_SHOWN_NAMES])}; its reload loses them",
                remedy="add the model to recipe_gkd/rollout/vllm, as gpt_oss.py does, or use another student",
                tensors=tuple(lost),
            )
        if missing := sorted(self._expected - self._loaded):
            raise WeightSyncError(
                f"{len(missing)} weights of the rollout engine were not received, such as "
                f"{', '.join(missing[:_MAX_SHOWN_NAMES])}",
                remedy="the actor must export every weight of the model under its Hugging Face name",
                tensors=tuple(missing),
            )


def _without_loaded_numbers(model: torch.nn.Module) -> set[str]:
    """Return the names of parameters of which vLLM's layerwise reload has received nothing."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, layer in model.named_modules()
        for buffered in [{each for each, _ in layerwise.get_layerwise_info(layer).loaded_weights}]
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.is_meta and name not in buffered
    }


def _places(model: torch.nn.Module) -> dict[str, tuple[int, int] | None]:
    """Return identity and address of each parameter by name, None on the device "meta"."""
    return {
        name: None if parameter.is_meta else (id(parameter), parameter.data_ptr())
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
