"""Construction of a sharded model: shard it without data, then read this rank's shards from the folder.

No rank reads or holds more of the model than its shards, and the layer or expert tensor that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from recipe_gkd.actor.folder_reader import FolderReader
from recipe_gkd.actor.fsdp.folder_tensors import StoredTensor, read_rows, stored_tensors
from recipe_gkd.actor.fsdp.local_rows import local_rows
from recipe_gkd.actor.fsdp.lora import add_adapters, base_state, initialize_adapters
from recipe_gkd.actor.student_dims import load_hf_config
from recipe_gkd.config.keys import FSDP
from recipe_gkd.config.schema import FsdpConfig, LoraConfig
from recipe_gkd.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        and the result of :func:`~recipe_gkd.actor.fsdp.folder_tensors.stored_tensors`.

    Raises:
        ModelError: A rank cannot read the folder, or the folder lacks weights. Raised on all ranks.
        ConfigError: ``wrap_policy`` or ``lora.target_modules`` names no module of the model.
    """
    result = _describe(folder, trust_remote_code=trust_remote_code)
    _raise_on_all_ranks(result if isinstance(result, ModelError) else None)
    module, stored, buffers = cast(_Described, result)
    # transformers would give the embeddings of the padding token no gradient. Here it is a token that can be sampled.
    for embedding in module.modules():
        if isinstance(embedding, torch.nn.Embedding):  # Gemma 4 has a second one
            embedding.padding_idx = None
    if lora is not None and lora.rank:
        add_adapters(module, lora)
    shard(module, config, mesh, device)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        with FolderReader(folder) as reader:
            _read_shards(module, stored, reader)
        initialize_adapters(module, seed)
    return module.eval(), stored


class _Described(NamedTuple):
    """A model without data, the form of its tensors in the folder, and the initial values of its buffers by name."""

    module: Any
    stored: dict[str, StoredTensor]
    buffers: dict[str, Tensor]


def _describe(folder: Path, *, trust_remote_code: bool) -> _Described | ModelError:
    """Return what the configuration and the headers of the weight files say about a model, or the error."""
    import transformers

    try:
        config = load_hf_config(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
        with FolderReader(folder) as reader:
            stored = stored_tensors(module, folder, reader.shapes())
        _register_constants(module)
        return _Described(module, stored, computed_buffers(module))
    except ModelError as error:
        return error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        return ModelError(
            f"transformers cannot load the model in {folder}: {type(error).__name__}: {error}",
            remedy="check the folder with AutoModelForCausalLM.from_pretrained",
            path=folder,
        )


def _register_constants(module: nn.Module) -> None:
    """Make buffers of the parameters that a model excludes from training, such as the router's correction of ERNIE 4.5.

    FSDP would compute with a parameter in the data type of the weights, and a rounded correction chooses other experts.
    """
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(part, name)
                part.register_buffer(name, parameter.detach())


def computed_buffers(module: PreTrainedModel) -> dict[str, Tensor]:
    """Return the values of the buffers that the model computes from its configuration, such as rotary frequencies.

    Args:
        module: Model on the device "meta". Its buffers get data.
    """
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # so transformers leaves it as it is
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros_like(buffer, device="cpu")
    module.initialize_weights()
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _raise_on_all_ranks(failure: ModelError | None) -> None:
    """Raise the error of the first rank that has one. Collective."""
    failures: list[ModelError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for each in failures:
        if each is not None:
            raise each


def shard(module: PreTrainedModel, config: FsdpConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard a model on the device "meta", and allocate this rank's shards and the buffers, without values.

    Args:
        module: Model without data.
        config: Sharding and data types.
        mesh: Mesh of all ranks.
        device: Device of the shards.

    Raises:
        ConfigError: ``wrap_policy`` names no module of the model.
    """
    dtype = getattr(torch, config.dtype)
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # what is not trained needs no float32 copy
    for layer in [*_layers(module, config.wrap_policy), module]:
        if config.gradient_checkpointing and layer is not module:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        reshard = config.reshard_after_forward and layer is not module
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for part in fsdp_modules(module):
        # The objective is divided by the tokens of the global batch, so gradients are summed. gloo can only sum.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    _allocate(module, device)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate the shards and the buffers on the device, keeping tied parameters tied."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((part, name))
    module.to_empty(device=device)
    for (first, first_name), *others in places.values():
        for part, name in others:
            part._parameters[name] = first._parameters[first_name]


def _read_shards(module: PreTrainedModel, stored: Mapping[str, StoredTensor], reader: FolderReader) -> None:
    """Read this rank's shards of the parameters, and the buffers that the folder has."""
    state = base_state(module)
    for name, form in stored.items():
        if not form.is_joined:
            [in_folder] = form.shapes
            reader.expect(in_folder, tuple(state[name].shape))
        rows, first = local_rows(state[name])
        if rows.numel():
            rows.copy_(read_rows(module, name, form, reader, first, first + len(rows) if rows.dim() else None))


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
