"""Tensors of the states that can leave the device; see :mod:`~recipe_gkd.actor.offload`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from recipe_gkd.actor.megatron.megatron_model import MegatronModel
from recipe_gkd.config.schema.actor import ActorState


def state_tensors(model: MegatronModel, state: ActorState) -> Iterable[Tensor]:
    """Return the tensors of a state on this rank. Not collective.

    Weights and gradients are views of Megatron's contiguous buffers. In float32 training the optimizer works on views
    of the weights, which belong to ``params``.

    Args:
        state: ``params``, ``grads`` or ``optimizer``.
    """
    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    if state == "params":
        return [parameter.detach() for parameter in parameters]
    if state == "grads":
        return [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    weights = {parameter.untyped_storage()._cdata for parameter in parameters}
    return [tensor for tensor in _optimizer_tensors(model.optimizer) if tensor.untyped_storage()._cdata not in weights]


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the weights that the inner optimizers change, and their state without step counts."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        if inner is None:  # a rank without parameters of this part
            continue
        for group in inner.param_groups:
            yield from (parameter.detach() for parameter in group["params"])
        for values in inner.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor) and value.ndim)
