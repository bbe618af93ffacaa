"""Comparison of the weights that an actor announces with the weights of the model folder, before the first transfer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from recipe_gkd.errors import ModelError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from teacher.common.weight_files import WeightFileError, weight_shapes

_NOT_WEIGHTS = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)(attn|attention)\.(masked_)?bias$"  # the causal mask of GPT-2, GPT-J and GPT-NeoX in older folders
)
_MAX_SHOWN_PROBLEMS = 5


def folder_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the folder's weight files. Reads headers only.

    Args:
        folder: Hugging Face model folder.

    Returns:
        Shapes by tensor name; empty if the folder has no safetensors file.

    Raises:
        ModelError: A weight file or the index is missing or damaged.
    """
    try:
        return weight_shapes(Path(folder))
    except WeightFileError as error:
        raise ModelError(f"the rollout model {folder}: {error}", path=Path(folder)) from error


def check_announced(meta: Sequence[TensorMeta], folder: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that the announced weights match the rollout model.

    vLLM joins several weights to one parameter, and does not detect that one of them is missing. The folder may have
    weights that are not trained: a tied output layer, layers after the last one (for multi-token prediction), and
    constants. Without ``tie_word_embeddings`` in its ``config.json``, the output layer may be tied.

    Args:
        meta: Weights that the actor announces.
        folder: Hugging Face model folder.
        shapes: Result of :func:`folder_shapes`; if it is empty, nothing is checked.

    Raises:
        WeightSyncError: A weight is missing, unknown, or has another shape.
    """
    if not shapes:
        return
    config = json.loads((Path(folder) / "config.json").read_text())
    announced = {name: tuple(shape) for name, shape, _ in meta}
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings", True) else set()
    expected = {name for name in shapes if not _is_untrained(name, config.get("num_hidden_layers"))}
    problems = {
        **{name: "is missing" for name in sorted(expected - announced.keys() - tied)},
        **{name: "is unknown" for name in sorted(announced.keys() - shapes.keys() - tied)},
        **{
            name: f"is {announced[name]}, in the folder {shapes[name]}"
            for name in sorted(expected & announced.keys())
            if announced[name] != shapes[name]
        },
    }
    if problems:
        n_hidden = len(problems) - _MAX_SHOWN_PROBLEMS
        shown = [f"{name} {problem}" for name, problem in islice(problems.items(), _MAX_SHOWN_PROBLEMS)]
        more = [f"and {n_hidden} more"] if n_hidden > 0 else []
        raise WeightSyncError(
            f"the actor's weights differ from the weights of the rollout model {folder}: {'; '.join([*shown, *more])}",
            remedy="both pools must be built from the same actor_rollout_ref.model.path, and the export must use its "
            "names",
            tensors=tuple(problems),
        )


def _is_untrained(name: str, n_layers: int | None) -> bool:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    after_last = layer is not None and n_layers is not None and int(layer.group(1)) >= n_layers
    return after_last or bool(_NOT_WEIGHTS.search(name))
