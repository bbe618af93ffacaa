"""Tensors of the states that can leave the device; see :mod:`~recipe_gkd.actor.offload`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor

from recipe_gkd.actor.fsdp.fsdp_model import FsdpModel
from recipe_gkd.config.schema.actor import ActorState


def state_tensors(model: FsdpModel, state: ActorState) -> Iterable[Tensor]:
    """Return this rank's shards of a state. Not collective.

    ``params`` include frozen weights. ``grads`` exist only during an update, so they have no key to offload them.

    Args:
        state: ``params``, ``grads`` or ``optimizer``.
    """
    if state == "params":
        return [_local(parameter) for parameter in model.module.parameters()]
    if state == "grads":
        return [_local(parameter.grad) for parameter in model.module.parameters() if parameter.grad is not None]
    moments = (value for values in model.optimizer.state.values() for value in values.values())
    return [_local(value) for value in moments if isinstance(value, Tensor) and value.ndim]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
