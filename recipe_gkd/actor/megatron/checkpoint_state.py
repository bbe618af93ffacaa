"""State of training that a checkpoint contains, as Megatron's sharded tensors.

It is the same with Transformer Engine's layers and without them, so that one can save it and the other load it:
:mod:`~recipe_gkd.actor.megatron.layer_spec` names the norms alike, and the extra states of Transformer Engine's modules
are left out. These belong to FP8, which is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from recipe_gkd.actor.megatron.data_parallel import complete_weights
from recipe_gkd.actor.megatron.megatron_model import MegatronModel
from recipe_gkd.actor.ranks import Layout

# The default sharding of the optimizer cannot be saved (dist_checkpointing/mapping.py rejects `flattened_range`). This
# one can also be loaded in any other parallel layout. `optimizer_shards` implements it.
OPTIMIZER_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

EXTRA_STATE = "_extra_state"
"""End of the names of a module's extra state."""


def optimizer_kind(model: MegatronModel) -> dict[str, Any]:
    """Return the settings that must be equal in two runs that exchange optimizer state."""
    return {
        "use_distributed_optimizer": isinstance(model.optimizer.chained_optimizers[0], DistributedOptimizer),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def describe(model: MegatronModel, contents: Sequence[str]) -> dict[str, Any]:
    """Return the description of a checkpoint, which is compared with the model before it is loaded.

    Args:
        contents: Parts of the checkpoint: ``model``, ``optimizer``, ``extra``.
    """
    return {
        "model": dataclasses.asdict(model.dims),
        "layout": str(model.layout),
        "contents": list(contents),
        "optimizer_kind": optimizer_kind(model),
        "lora": None if model.lora is None else model.lora.about(),
    }


def sharded_state(model: MegatronModel, *, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's sharded state of the trained weights and the optimizer. Collective.

    With adapters they are the only weights. The others come from the model folder.

    Args:
        with_optimizer: Include the optimizer.
        is_loading: The state is the target of a load.
    """
    complete_weights(model.wrapped)
    state: dict[str, Any]
    if model.lora is not None:
        state = {"adapters": model.lora.sharded_state()}
    else:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        state = {
            f"model{number}": {
                name: shard
                for name, shard in chunk.sharded_state_dict(
                    metadata=OPTIMIZER_SHARDING | {"dp_cp_group": group}
                ).items()
                if not name.endswith(EXTRA_STATE)
            }
            for number, chunk in enumerate(model.chunks)
        }
    if with_optimizer:
        _allocate_adam_state(model.optimizer)
        state["optimizer"] = model.optimizer.sharded_state_dict(
            dict(state), is_loading=is_loading, metadata=OPTIMIZER_SHARDING
        )
        _keep_step_of_zero(state["optimizer"])
    return state


def load_weights(model: MegatronModel, loaded: dict[str, Any]) -> None:
    """Set the trained weights to a loaded state.

    Args:
        loaded: State with tensors in the place of the sharded tensors of :func:`sharded_state`.
    """
    if model.lora is not None:
        model.lora.load_state(loaded["adapters"])
        return
    for number, chunk in enumerate(model.chunks):
        kept = {name: value for name, value in chunk.state_dict().items() if name.endswith(EXTRA_STATE)}
        chunk.load_state_dict(loaded[f"model{number}"] | kept)


def _allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """Allocate the state of AdamW as at step 0: a save before the first update has what a load expects."""
    for part in optimizer.chained_optimizers:
        adam = part.optimizer
        if not isinstance(adam, torch.optim.AdamW):  # of Transformer Engine or Apex, which count steps in the groups
            part.init_state_fn(adam, part.config)
            for group in adam.param_groups:
                group.setdefault("step", 0)
            continue
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _keep_step_of_zero(state: dict[str, Any]) -> None:
    """Add the common step to states of optimizers that are not distributed; Megatron leaves it out if it is 0."""
    if "param_groups" in state and "state" in state:
        state["state"].setdefault("common_step", torch.tensor(0.0))
    for part in state.values():
        if isinstance(part, dict):
            _keep_step_of_zero(part)


def rng_state(layout: Layout) -> ShardedObject:
    """Return the state of the random generators, one entry per rank: ranks that share experts have different states."""
    states = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (layout.world_size,), (layout.rank,))


def restore_rng(states: dict[str, Any]) -> None:
    """Set the random generators to states from :func:`rng_state`, if they are of the same kind of device.

    Megatron's tracker has states of the device's generator, which no generator of another kind of device accepts.
    """
    if ("cuda" in states) != torch.cuda.is_available():
        return
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
