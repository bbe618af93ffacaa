"""Tensors of the model folder and the parameters of transformers' model that they make.

A folder may name its tensors differently from the modules of transformers: GPT-2 has ``h.0.ln_1.weight`` there for
``transformer.h.0.ln_1.weight``, and GPT-NeoX has ``embed_out.weight`` for ``lm_head.weight``. It may also have several
tensors for one parameter: those of the experts of a layer, which transformers joins. The rollout engine has read the
same folder, so it accepts the folder's tensors. A saved folder with them can be loaded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from recipe_gkd.actor.folder_reader import FolderReader
from recipe_gkd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_SHOWN_NAMES = 3

Shapes = dict[str, tuple[int, ...]]
"""Shape of each tensor by its name."""


@dataclass(frozen=True)
class StoredTensor:
    """Form of a parameter or buffer in the model folder.

    Attributes:
        shapes: Shape of each of its tensors, in the order of the export.
        joined: Names of the tensors from which transformers computes it, such as those of all experts, by the pattern
            of its conversion. Empty if it is equal to its only tensor.
    """

    shapes: Shapes
    joined: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def is_joined(self) -> bool:
        """True if transformers computes it from its tensors."""
        return bool(self.joined)


def stored_tensors(model: PreTrainedModel, folder: Path, in_folder: Shapes) -> dict[str, StoredTensor]:
    """Return the form in the folder of each tensor by its name in the model, each tied tensor once.

    All parameters are in the result, and the buffers that the folder has.

    Args:
        model: Model of transformers for the folder, not sharded, with or without data. Its list of conversions for
            a saved folder is set, as loading it with transformers would.
        folder: Hugging Face folder.
        in_folder: Shape of each of its tensors.

    Raises:
        ModelError: A parameter of the model is not in the folder, or joined from tensors that cannot be computed from
            it. ``names`` has its name.
    """
    state = model.state_dict(keep_vars=True)
    sources = _sources(model, state, in_folder)
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_by_id.setdefault(id(tensor), []).append(name)
    found: dict[str, StoredTensor] = {}
    missing: list[str] = []
    for names in names_by_id.values():
        name = next((name for name in names if name in sources), names[0])
        if name not in sources:
            missing += [name] if isinstance(state[name], nn.Parameter) else []
        elif joined := {pattern: parts for pattern, parts in sources[name].items() if pattern}:
            found[name] = StoredTensor(_shapes_in_folder(model, name, state[name], in_folder), joined)
        else:
            found[name] = StoredTensor({sources[name][""][0]: tuple(state[name].shape)})
    if missing:
        shown = ", ".join(missing[:_MAX_SHOWN_NAMES])
        raise ModelError(
            f"the weight files of {folder} lack {len(missing)} weights of {type(model).__name__}, such as {shown}",
            path=folder,
            names=tuple(missing),
        )
    return found


def read_rows(
    model: PreTrainedModel, name: str, form: StoredTensor, reader: FolderReader, first: int, last: int | None
) -> Tensor:
    """Return rows of a parameter or buffer in the folder's data type. Reads nothing else, where the form allows it.

    Args:
        model: Model of transformers, after :func:`stored_tensors`.
        name: Name in the model.
        form: Form in the folder.
        reader: Reader of the folder.
        first: Index of the first row.
        last: Index after the last row; None for a number, which has no rows.
    """
    rows = () if last is None else (slice(first, last),)
    if not form.is_joined:
        [stored] = form.shapes
        return reader.read(stored, rows)
    a_pattern = next(iter(form.joined))
    steps: Any = model._weight_conversions
    converter = deepcopy(next(step for step in steps if a_pattern in step.source_patterns))
    by_expert = _keeps_experts_apart(converter.operations)
    for pattern, parts in form.joined.items():
        for part in parts[first:last] if by_expert else parts:
            converter.add_tensor(name, part, pattern, partial(reader.read, part))
    [tensor] = converter.convert(name, model=model, config=model.config).values()
    return tensor if by_expert else tensor[rows]


def as_in_folder(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors of the folder for one that transformers has joined."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return found


def _sources(model: Any, state: dict[str, Tensor], in_folder: Shapes) -> dict[str, dict[str, list[str]]]:
    """Return the names in the folder by the name in the model, and by the pattern of a conversion; "" for none.

    As in ``convert_and_load_state_dict_in_model`` of transformers.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    sources: dict[str, dict[str, list[str]]] = {}
    for name in sorted(in_folder, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        sources.setdefault(renamed, {}).setdefault(pattern or "", []).append(name)
    model._weight_conversions = [step for step in steps if step.was_used()]
    return sources


def _shapes_in_folder(model: PreTrainedModel, name: str, tensor: Tensor, in_folder: Shapes) -> Shapes:
    shapes = {part: tuple(each.shape) for part, each in as_in_folder(model, name, tensor.detach()).items()}
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


def _keeps_experts_apart(operations: list[Any]) -> bool:
    """Return True if each expert of the result depends on the tensors of this expert only."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *others = operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(
            (isinstance(step, Concatenate) and step.dim > 0)
            or (isinstance(step, Transpose) and step.dim0 > 0 and step.dim1 > 0)
            for step in others
        )
    )
