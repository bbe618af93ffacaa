"""Export of complete weights as the tensors of the model folder, for the rollout workers and for a saved folder.

A folder may name its tensors differently from the modules of transformers: GPT-2 has ``h.0.ln_1.weight`` there for
``transformer.h.0.ln_1.weight``, and GPT-NeoX has ``embed_out.weight`` for ``lm_head.weight``. It may also have several
tensors for one parameter: those of the experts of a layer, which transformers joins. The rollout engine has read the
same folder, so it accepts the folder's tensors. A saved folder with them can be loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_gkd.actor.fsdp.lora import base_state, layers_by_weight, merged_weight
from recipe_gkd.errors import ModelError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from teacher.common.weight_files import weight_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_SHOWN_NAMES = 3

Shapes = dict[str, tuple[int, ...]]
"""Shape of each tensor by its name."""


@dataclass(frozen=True)
class StoredTensor:
    """Form of a parameter or buffer in the model folder.

    Attributes:
        shapes: Shape of each of its tensors, in order.
        is_joined: True if transformers computes it from these tensors, such as from those of all experts.
    """

    shapes: Shapes
    is_joined: bool = False


def stored_tensors(model: PreTrainedModel, folder: Path) -> dict[str, StoredTensor]:
    """Return the form in the folder of each tensor by its name in the model, each tied tensor once.

    All parameters are exported, and the buffers that the folder has.

    Args:
        model: Model of transformers, not sharded, that was loaded from the folder.
        folder: Hugging Face folder with safetensors files.

    Raises:
        ModelError: A parameter of the model is not in the folder, or joined from tensors that cannot be computed from
            it. ``names`` has its name.
        WeightFileError: A weight file cannot be read.
    """
    state, in_folder = model.state_dict(keep_vars=True), weight_shapes(folder)
    renamed, joined = _renamed(model, state, in_folder), _joined_names(model, state)
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_by_id.setdefault(id(tensor), []).append(name)
    found, missing = {}, []
    for names in names_by_id.values():
        if names[0] in joined:
            found[names[0]] = StoredTensor(_shapes_in_folder(model, names[0], state[names[0]], in_folder), True)
        elif known := [name for name in names if name in renamed]:
            found[known[0]] = StoredTensor({renamed[known[0]]: tuple(state[known[0]].shape)})
        elif isinstance(state[names[0]], nn.Parameter):
            missing.append(names[0])
    if missing:
        shown = ", ".join(missing[:_MAX_SHOWN_NAMES])
        raise ModelError(
            f"the weight files of {folder} lack {len(missing)} weights of {type(model).__name__}, such as {shown}",
            path=folder,
            names=tuple(missing),
        )
    return found


def _renamed(model: PreTrainedModel, state: dict[str, Tensor], in_folder: Shapes) -> dict[str, str]:
    """Return the name in the folder by the name in the model, as in ``convert_and_load_state_dict_in_model``."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]
    stored: dict[str, str] = {}
    for name in sorted(in_folder, key=dot_natural_key):
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed = name
        stored.setdefault(renamed, name)
    return stored


def _joined_names(model: PreTrainedModel, state: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors that transformers computes from other ones when it loads a folder."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    steps = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightConverter)]
    if not steps:
        return set()
    reverse: list[Any] = [step.reverse_transform() for step in steps[::-1]]
    return {name for name in state if rename_source_key(name, [], reverse, reverse=True)[1] is not None}


def _shapes_in_folder(model: PreTrainedModel, name: str, tensor: Tensor, in_folder: Shapes) -> Shapes:
    shapes = {part: tuple(each.shape) for part, each in _as_in_folder(model, name, tensor.detach()).items()}
    for part, shape in shapes.items():
        if in_folder.get(part) == shape:
            continue
        raise ModelError(
            f"{type(model).__name__}: the rollout engine would get {part} with the shape {shape} for {name}, but the "
            f"model folder has {in_folder.get(part, 'no such tensor')}",
            remedy="save the folder again with save_pretrained() of transformers",
            names=(name,),
        )
    return shapes


def _as_in_folder(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors of the folder for one that transformers has joined."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return found


def weights_meta(module: nn.Module, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> list[list[TensorMeta]]:
    """Return name, complete shape and dtype of the tensors of :func:`export_weights`, for each weight in order.

    Args:
        module: Sharded model.
        stored: Result of :func:`stored_tensors`.
        dtype: Data type of exported weights.
    """
    state = base_state(module)
    dtypes = {name: str(_dtype(state[name], dtype)).removeprefix("torch.") for name in stored}
    return [[(part, shape, dtypes[name]) for part, shape in form.shapes.items()] for name, form in stored.items()]


@torch.no_grad()
def export_weights(
    module: PreTrainedModel,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    *,
    is_first_rank: bool,
    first: int = 0,
    last: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Gather complete weights, one at a time. Collective.

    Args:
        module: Sharded model.
        stored: Result of :func:`stored_tensors`.
        dtype: Data type of exported weights.
        is_first_rank: True on rank 0.
        first: Index of the first weight.
        last: Index after the last weight; None for all.

    Yields:
        Name and tensor in the folder, on rank 0; nothing on the other ranks, which must exhaust the iterator as well.
    """
    adapted, state = layers_by_weight(module), base_state(module)
    for name, form in list(stored.items())[first:last]:
        shard = state[name]
        if layer := adapted.get(id(shard)):
            tensor = merged_weight(layer).to(dtype)
        else:
            tensor = shard.detach().to(_dtype(shard, dtype))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not is_first_rank:
            continue
        if form.is_joined:
            parts = _as_in_folder(module, name, tensor)
            yield from ((part, parts[part].contiguous()) for part in form.shapes)
        else:
            yield from ((part, tensor) for part in form.shapes)


def _dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
