"""Export of complete weights under the names of the model folder, for the rollout workers and for a saved folder.

A folder may name its tensors differently from the modules of transformers: GPT-2 has ``h.0.ln_1.weight`` there for
``transformer.h.0.ln_1.weight``, and GPT-NeoX has ``embed_out.weight`` for ``lm_head.weight``. The rollout engine has
read the same folder, so it accepts the folder's names. A saved folder with these names can be loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipe_gkd.actor.fsdp.lora import base_state, layers_by_weight, merged_weight
from recipe_gkd.errors import ModelError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from teacher.common.weight_files import open_weights, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_SHOWN_NAMES = 3


def names_in_folder(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Return the exported name of each tensor by its name in the model, each tied tensor once.

    All parameters are exported, and the buffers that the folder has.

    Args:
        model: Model of transformers, not sharded, that was loaded from the folder.
        folder: Hugging Face folder with safetensors files.

    Raises:
        ModelError: A parameter of the model is not in the folder. ``names`` has its name.
        WeightFileError: A weight file cannot be read.
    """
    state = model.state_dict(keep_vars=True)
    stored = _stored_names(model, state, folder)
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_by_id.setdefault(id(tensor), []).append(name)
    exported, missing = {}, []
    for names in names_by_id.values():
        if known := [name for name in names if name in stored]:
            exported[known[0]] = stored[known[0]]
        elif isinstance(state[names[0]], nn.Parameter):
            missing.append(names[0])
    if missing:
        shown = ", ".join(missing[:_MAX_SHOWN_NAMES])
        raise ModelError(
            f"the weight files of {folder} lack {len(missing)} weights of {type(model).__name__}, such as {shown}",
            path=folder,
            names=tuple(missing),
        )
    return exported


def _stored_names(model: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> dict[str, str]:
    """Return the name in the folder by the name in the model, as in ``convert_and_load_state_dict_in_model``."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    found = set[str]()
    for path in weight_files(folder):
        with open_weights(path) as file:
            found.update(file.keys())
    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]
    stored: dict[str, str] = {}
    for name in sorted(found, key=dot_natural_key):
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed = name
        stored.setdefault(renamed, name)
    return stored


def weights_meta(module: nn.Module, names: Mapping[str, str], dtype: torch.dtype) -> list[list[TensorMeta]]:
    """Return name, complete shape and dtype of each tensor of :func:`export_weights`, in order.

    Args:
        module: Sharded model.
        names: Result of :func:`names_in_folder`.
        dtype: Data type of exported weights.
    """
    return [
        [(name, tuple(tensor.shape), str(_dtype(tensor, dtype)).removeprefix("torch."))]
        for name, tensor in _exported(module, names)
    ]


@torch.no_grad()
def export_weights(
    module: nn.Module,
    names: Mapping[str, str],
    dtype: torch.dtype,
    *,
    is_first_rank: bool,
    first: int = 0,
    last: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Gather complete weights, one at a time. Collective.

    Args:
        module: Sharded model.
        names: Result of :func:`names_in_folder`.
        dtype: Data type of exported weights.
        is_first_rank: True on rank 0.
        first: Index of the first weight.
        last: Index after the last weight; None for all.

    Yields:
        Name and tensor on rank 0; nothing on the other ranks, which must exhaust the iterator as well.
    """
    adapted = layers_by_weight(module)
    for name, shard in _exported(module, names)[first:last]:
        if layer := adapted.get(id(shard)):
            tensor = merged_weight(layer).to(dtype)
        else:
            tensor = shard.detach().to(_dtype(shard, dtype))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if is_first_rank:
            yield name, tensor


def _exported(module: nn.Module, names: Mapping[str, str]) -> list[tuple[str, Tensor]]:
    """Return exported name and shard of each tensor, in order."""
    state = base_state(module)
    return [(exported, state[name]) for name, exported in names.items()]


def _dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
