"""Construction of a sharded model: load on rank 0, then materialize, broadcast and shard one layer at a time.

No device ever holds the whole model, and only rank 0 holds it in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from recipe_gkd.actor.fsdp.lora import add_adapters
from recipe_gkd.actor.fsdp.weights import StoredTensor, stored_tensors
from recipe_gkd.actor.student_dims import load_hf_config
from recipe_gkd.config.keys import FSDP
from recipe_gkd.config.schema import FsdpConfig, LoraConfig
from recipe_gkd.errors import ConfigError, ModelError
from teacher.common.weight_files import WeightFileError

if TYPE_CHECKING:
    from transformers import AutoModelForCausalLM, PreTrainedModel


def load_sharded(
    folder: Path,
    config: FsdpConfig,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    trust_remote_code: bool,
    lora: LoraConfig | None = None,
    seed: int = 0,
) -> tuple[Any, dict[str, StoredTensor]]:
    """Load a causal language model and shard it. Collective.

    Args:
        folder: Hugging Face folder of the model.
        config: Sharding and data types.
        mesh: Mesh of all ranks.
        device: Device of the parameters.
        trust_remote_code: Allow code from the folder.
        lora: Adapters; None for none.
        seed: Seed of the adapters.

    Returns:
        The model in evaluation mode, because dropout would change the distribution that the rollout engine samples,
        and the result of :func:`~recipe_gkd.actor.fsdp.weights.stored_tensors`.

    Raises:
        ModelError: The folder cannot be loaded on rank 0, or lacks weights. Raised on all ranks.
        ConfigError: ``wrap_policy`` or ``lora.target_modules`` names no module of the model.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    source, stored, failure = _load_on_first_rank(folder, options)
    results: list[Any] = [failure, stored]
    dist.broadcast_object_list(results)
    if results[0] is not None:
        raise results[0]
    with torch.device("meta"):
        module = _auto_model().from_config(load_hf_config(folder, trust_remote_code=trust_remote_code), **options)
    if source is not None:
        # `revert_weight_conversion` needs it for the names of the folder, which may be older than those of the model.
        module._weight_conversions = getattr(source, "_weight_conversions", None)
    # transformers would give the embedding of the padding token no gradient. Here it is a token that can be sampled.
    module.get_input_embeddings().padding_idx = None
    module.requires_grad_(True)
    if lora is not None and lora.rank:
        for model in (module, source):
            if model is not None:
                add_adapters(model, lora, seed)
    shard(module, source, config, mesh, device)
    return module.eval(), results[1]


def _load_on_first_rank(
    folder: Path, options: dict[str, Any]
) -> tuple[Any, dict[str, StoredTensor] | None, ModelError | None]:
    """Return the model with data and the form of its tensors in the folder on rank 0, or the error; nothing elsewhere.

    Args:
        folder: Hugging Face folder of the model.
        options: Options of ``from_pretrained``.
    """
    if dist.get_rank() != 0:
        return None, None, None
    try:
        source = _auto_model().from_pretrained(str(folder), local_files_only=True, **options)
        return source, stored_tensors(source, folder), None
    except ModelError as error:
        return None, None, error
    except (OSError, ValueError, KeyError, RuntimeError, WeightFileError) as error:
        failure = ModelError(
            f"transformers cannot load the model in {folder}: {type(error).__name__}: {error}",
            remedy="check the folder with AutoModelForCausalLM.from_pretrained",
            path=folder,
        )
        return None, None, failure


def shard(
    module: PreTrainedModel, source: nn.Module | None, config: FsdpConfig, mesh: DeviceMesh, device: torch.device
) -> None:
    """Materialize a model on the device "meta" and shard it. Collective.

    Args:
        module: Model without data.
        source: The same model with data on rank 0; None elsewhere.
        config: Sharding and data types.
        mesh: Mesh of all ranks.
        device: Device of the parameters.

    Raises:
        ConfigError: ``wrap_policy`` names no module of the model.
    """
    is_half = config.dtype != "float32"
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.dtype) if is_half else None, reduce_dtype=torch.float32
    )
    data = {} if source is None else _tensors(source)
    fill = partial(_broadcast_from_source, data, device)
    materialized: dict[int, Tensor] = {}
    for layer in [*_layers(module, config.wrap_policy), module]:
        _materialize(module, layer, fill, materialized, getattr(torch, config.dtype))
        if config.gradient_checkpointing and layer is not module:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        reshard = config.reshard_after_forward and layer is not module
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for part in fsdp_modules(module):
        # The objective is divided by the tokens of the global batch, so gradients are summed. gloo can only sum.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Return the modules to which ``fully_shard`` was applied."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def model_class(module: nn.Module) -> Any:
    """Return the class of a model of transformers. ``fully_shard`` derives another class from it."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


def model_name(module: nn.Module) -> str:
    """Return the name of :func:`model_class`."""
    return str(model_class(module).__name__)


@contextmanager
def resharded(module: nn.Module) -> Iterator[None]:
    """Free the gathered weights at the end, so that weights that are loaded later are not ignored.

    Without a backward pass, FSDP keeps the weights of the root.
    """
    try:
        yield
    finally:
        for part in fsdp_modules(module):
            part.reshard()


def _auto_model() -> type[AutoModelForCausalLM]:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # it would be part of the run's log
    return transformers.AutoModelForCausalLM


def _layers(module: PreTrainedModel, wrap_policy: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules whose weights are gathered together, in the order of the model."""
    names = set(wrap_policy if wrap_policy is not None else module._no_split_modules or ())
    found = [part for part in module.modules() if type(part).__name__ in names]
    if not found and wrap_policy:
        known = sorted({type(part).__name__ for part in module.modules() if isinstance(part, nn.Module)})
        raise ConfigError(
            f"{FSDP}.wrap_policy={list(wrap_policy)} names no module of {model_name(module)}",
            remedy=f"its module classes are {', '.join(known)}",
            keys=(f"{FSDP}.wrap_policy",),
        )
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each tied tensor under all its names."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return tensors | dict(module.named_buffers(remove_duplicate=False))


def _materialize(
    root: nn.Module,
    layer: nn.Module,
    fill: Callable[[str, Tensor], Tensor],
    materialized: dict[int, Tensor],
    frozen_dtype: torch.dtype,
) -> None:
    """Replace parameters and buffers of a layer on the device "meta", keeping tied tensors tied.

    Args:
        root: The whole model, for the names.
        layer: Layer to change. Its parts with data are not changed.
        fill: Returns the tensor with data for a name and a tensor without.
        materialized: New tensor by id of the old one.
        frozen_dtype: Data type of parameters that are not trained.
    """
    prefixes = {id(part): name for name, part in root.named_modules()}
    for part in layer.modules():
        prefix = f"{prefixes[id(part)]}." if prefixes[id(part)] else ""
        for tensors in (part._parameters, part._buffers):
            for name, old in tensors.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in materialized:
                    new = fill(prefix + name, old)
                    materialized[id(old)] = _parameter(new, old, frozen_dtype) if isinstance(old, nn.Parameter) else new
                tensors[name] = materialized[id(old)]  # type: ignore[assignment]


def _parameter(data: Tensor, like: nn.Parameter, frozen_dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that is trained, or frozen, as the given one. Frozen ones need no float32 copy."""
    if like.requires_grad or not data.is_floating_point():
        return nn.Parameter(data, requires_grad=like.requires_grad)
    return nn.Parameter(data.to(frozen_dtype), requires_grad=False)


def _broadcast_from_source(data: Mapping[str, Tensor], device: torch.device, name: str, like: Tensor) -> Tensor:
    """Return the tensor of rank 0 with this name, on every rank. Collective."""
    tensor = data[name].detach().to(device, copy=True) if data else torch.empty_like(like, device=device)
    if tensor.dtype == torch.bool:  # gloo cannot send it
        as_bytes = tensor.to(torch.uint8)
        dist.broadcast(as_bytes, 0)
        return as_bytes.bool()
    dist.broadcast(tensor, 0)
    return tensor
