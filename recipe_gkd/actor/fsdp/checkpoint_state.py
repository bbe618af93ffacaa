"""State of training that a checkpoint of the FSDP backend contains, as tensors by name.

======================================  ==========================  ==============================================
name                                    tensor                      part
======================================  ==========================  ==============================================
``model.<parameter>``                   complete shape, sharded     ``model``
``optimizer.<parameter>.exp_avg``       complete shape, sharded     ``optimizer``
``optimizer.<parameter>.exp_avg_sq``    complete shape, sharded     ``optimizer``
``rng.<device type>.<rank>``            state of a generator        ``extra``; loaded by the same number of ranks
======================================  ==========================  ==============================================

Names of parameters do not depend on the number of ranks or on ``fsdp_size``. The description of the checkpoint contains
the step counts of AdamW. Buffers and frozen parameters do not change in training; they come from the model folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.actor.checkpoint.files import BACKEND
from recipe_gkd.actor.fsdp.fsdp_model import FsdpModel
from recipe_gkd.actor.fsdp.loading import fsdp_modules
from recipe_gkd.actor.fsdp.lora import adapter_dims
from recipe_gkd.actor.fsdp.model_dims import config_value

STRATEGY = "fsdp"
MOMENTS = ("exp_avg", "exp_avg_sq")
COMPARED_DIMS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
"""Fields of the model's configuration that must be equal. Shapes of weights do not contain the numbers of heads."""


def trained_parameters(model: FsdpModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name. Tied parameters have one name."""
    return {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}


def sharded_state(model: FsdpModel, *, with_optimizer: bool) -> dict[str, Tensor]:
    """Return the sharded weights and moments. They share memory with the model and its optimizer.

    Args:
        with_optimizer: Include the moments. They are allocated if no update has been made yet.
    """
    for module in fsdp_modules(model.module):
        module.reshard()  # after a forward pass without a backward pass, the parameters are still the gathered ones
    parameters = trained_parameters(model)
    state = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    if with_optimizer:
        _allocate_adam_state(model.optimizer)
        for name, parameter in parameters.items():
            adam = model.optimizer.state[parameter]
            state |= {f"optimizer.{name}.{moment}": adam[moment] for moment in MOMENTS}
    return state


def _allocate_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Allocate the state of parameters that have none, as the first update would (torch/optim/adam.py)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                step_device = parameter.device if group["fused"] or group["capturable"] else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=step_device),
                    **{moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS},
                }


def set_adam_steps(model: FsdpModel, steps: dict[str, int]) -> None:
    """Set the number of updates of each parameter."""
    for name, parameter in trained_parameters(model).items():
        model.optimizer.state[parameter]["step"].fill_(steps[name])


def describe(model: FsdpModel, step: int, contents: Sequence[str]) -> dict[str, Any]:
    """Return the description of a checkpoint, which is compared with the model before it is loaded.

    Args:
        model: Model in training. With ``optimizer`` in ``contents`` its moments must be allocated.
        step: Number of completed updates.
        contents: Parts of the checkpoint: ``model``, ``optimizer``, ``extra``.
    """
    description = {
        BACKEND: STRATEGY,
        "contents": list(contents),
        "model": model_dims(model),
        "ranks": model.layout.world_size,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if "optimizer" in contents:
        states = {name: model.optimizer.state[parameter] for name, parameter in trained_parameters(model).items()}
        description["adam_steps"] = {name: int(state["step"]) for name, state in states.items()}
    if "extra" in contents:
        description |= {"step": step, "rng": rng_kinds(model)}
    return description


def model_dims(model: FsdpModel) -> dict[str, Any]:
    """Return the dimensions of the model and of its adapters that a checkpoint must have; see :data:`COMPARED_DIMS`."""
    config = model.module.config.get_text_config()
    dims = {name: config_value(config, name) for name in COMPARED_DIMS}
    dims |= adapter_dims(model.module)
    return dict(json.loads(json.dumps(dims)))  # a tuple equals the list that is read from a checkpoint


def rng_kinds(model: FsdpModel) -> list[str]:
    """Return the device types of this rank's random generators."""
    return list(_generators(model))


def rng_state(model: FsdpModel) -> dict[str, Tensor]:
    """Return the states of this rank's random generators."""
    return {_rng_key(model, kind): get_state() for kind, (get_state, _) in _generators(model).items()}


def restore_rng(model: FsdpModel, state: dict[str, Tensor]) -> None:
    """Set the random generators to a state from :func:`rng_state`."""
    for kind, (_, set_state) in _generators(model).items():
        set_state(state[_rng_key(model, kind)])


def _rng_key(model: FsdpModel, kind: str) -> str:
    return f"rng.{kind}.{model.layout.rank}"


def _generators(model: FsdpModel) -> dict[str, Any]:
    """Return the functions that read and set the random generators, by device type."""
    generators: dict[str, Any] = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if model.device.type == "cuda":
        generators["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return generators
