"""Read a Hugging Face folder into this rank's model chunks: by name, lazily, only its own part of each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from recipe_gkd.actor.hf_layout import read_shard
from recipe_gkd.actor.hf_names import EMBEDDING, OUTPUT, Weight, weights
from recipe_gkd.actor.model_dims import ModelDims
from recipe_gkd.actor.parallel import Layout
from recipe_gkd.errors import ModelError
from teacher.weight_files import INDEX_NAME, WeightFileError, open_weights, read_index


def own_parameters(chunks: Sequence[GPTModel], shape: ModelDims, layout: Layout) -> list[tuple[Weight, Tensor | None]]:
    """Every weight of the model in order, with this rank's parameter for it; None if only other ranks have it."""
    in_layers: dict[tuple[int, str], Tensor] = {}
    outside: dict[str, Tensor] = {}
    for chunk in chunks:
        outside |= {name: p for name, p in chunk.named_parameters() if not name.startswith("decoder.layers.")}
        for layer in chunk.decoder.layers:
            in_layers |= {(layer.layer_number - 1, name): p for name, p in layer.named_parameters()}

    experts = range(0)
    if shape.mixture is not None:
        count = shape.mixture.experts // layout.ep_size
        experts = range(layout.ep_rank * count, (layout.ep_rank + 1) * count)

    def find(weight: Weight) -> Tensor | None:
        if weight.expert is not None and weight.expert not in experts:
            return None
        for name in weight.mcore:
            if weight.expert is not None:
                name = name.format(experts.index(weight.expert))
            found = outside.get(name) if weight.layer is None else in_layers.get((weight.layer, name))
            if found is not None:
                return found
        return None

    return [(weight, find(weight)) for weight in weights(shape)]


@torch.no_grad()
def load_hf(path: str | Path, chunks: Sequence[GPTModel], shape: ModelDims, layout: Layout) -> None:
    """Fill every parameter of ``chunks``; :class:`ModelError` for a tensor that is missing or of another shape."""
    unfilled = {id(p): name for chunk in chunks for name, p in chunk.named_parameters()}
    with ExitStack() as stack:
        reader = _FolderReader(Path(path), stack)
        for weight, parameter in own_parameters(chunks, shape, layout):
            targets = [] if parameter is None else [parameter]
            if shape.tied and weight.mcore == (EMBEDDING,):  # a last stage apart has its own copy, as output layer
                targets += [p for chunk in chunks for name, p in chunk.named_parameters() if name == OUTPUT]
            if not targets:
                continue
            for name, size in weight.hf:
                reader.expect(name, size)
            rank, parts = (
                (layout.tp_rank, layout.tp_size) if weight.expert is None else (layout.etp_rank, layout.etp_size)
            )
            shard = read_shard(weight, shape, reader.part, rank, parts)
            for target in targets:
                target.copy_(shard)
                unfilled.pop(id(target), None)
    if unfilled:
        raise ModelError(f"{path}: nothing in the folder fills these parameters: {', '.join(unfilled.values())}")


class _FolderReader:
    """Parts of tensors out of one safetensors file, or of several with an index; files are opened when first needed."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._open: dict[str, Any] = {}
        single = folder / "model.safetensors"
        try:
            file_of = read_index(folder)
        except WeightFileError as error:
            raise ModelError(str(error)) from error
        if file_of is None:
            if not single.is_file():
                raise ModelError(
                    f"no {single.name} or {INDEX_NAME} in {folder}; save the model in that format (save_pretrained "
                    "does)"
                )
            file_of = dict.fromkeys(self._handle(single.name).keys(), single.name)
        self._file_of = file_of

    def expect(self, name: str, size: tuple[int, ...]) -> None:
        if name not in self._file_of:
            raise ModelError(f"{self._folder}: there is no tensor {name}, which its config.json calls for")
        got = tuple(self._handle(self._file_of[name]).get_slice(name).get_shape())
        if got != size:
            raise ModelError(f"{self._folder}: tensor {name} has shape {got}, its config.json calls for {size}")

    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        return self._handle(self._file_of[name]).get_slice(name)[where or ...]

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(open_weights(self._folder / file, framework="pt"))
            except WeightFileError as error:
                raise ModelError(str(error)) from error
        return self._open[file]
