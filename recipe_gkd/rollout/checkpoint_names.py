"""Compare the weights that an actor announces with those of the model folder, before anything is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from recipe_gkd.errors import ModelError, WeightSyncError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from teacher.weight_files import WeightFileError, open_weights, weight_files

_NOT_WEIGHTS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def folder_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the folder's weight files; empty if it has none. Reads headers only.

    Raises:
        ModelError: A weight file or the index is missing or damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in weight_files(Path(folder)):
            with open_weights(path) as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except WeightFileError as error:
        raise ModelError(f"the rollout model {folder}: {error}") from error
    return shapes


def check_announced(meta: Sequence[TensorMeta], folder: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise :class:`WeightSyncError` for a missing, unknown or differently shaped weight.

    vLLM joins several weights to one parameter and does not notice when one of them never comes. What the folder may
    have and training may not: a tied output layer, and layers after the last one (for multi-token prediction).
    """
    if not shapes:
        return
    config = json.loads((Path(folder) / "config.json").read_text())
    announced = {name: tuple(shape) for name, shape, _ in meta}
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    expected = {name for name in shapes if not _not_trained(name, config.get("num_hidden_layers"))}
    complaints = [
        *(f"{name} is missing" for name in sorted(expected - announced.keys() - tied)),
        *(f"{name} is unknown" for name in sorted(announced.keys() - shapes.keys() - tied)),
        *(
            f"{name} is {announced[name]}, in the folder {shapes[name]}"
            for name in sorted(expected & announced.keys())
            if announced[name] != shapes[name]
        ),
    ]
    if complaints:
        shown = "; ".join(complaints[:5]) + (f"; and {len(complaints) - 5} more" if len(complaints) > 5 else "")
        raise WeightSyncError(
            f"the actor's weights do not fit the rollout model {folder}: {shown}; both pools must be built from the "
            "same actor_rollout_ref.model.path, and the export must use its names"
        )


def _not_trained(name: str, n_layers: int | None) -> bool:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    after_last = layer is not None and n_layers is not None and int(layer.group(1)) >= n_layers
    return after_last or bool(_NOT_WEIGHTS.search(name))
