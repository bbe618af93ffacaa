"""Model folders that commands accept: a Hugging Face folder, a checkpoint, or the folder of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipe_gkd.checkpoints.folders import steps_of
from recipe_gkd.checkpoints.newest import find_checkpoint, is_run
from recipe_gkd.errors import ModelError


def model_folder(path: Path) -> Path:
    """Return the Hugging Face folder at ``path``: the folder itself, or ``huggingface`` in a checkpoint.

    Of the folder of a run, the newest complete checkpoint is used.

    Raises:
        ModelError: There is none.
        CheckpointError: The run has no complete checkpoint.
    """
    if not (path / "config.json").is_file() and is_run(path) and steps_of(path):
        path = find_checkpoint(path)
    folder = path / "huggingface" if (path / "huggingface" / "config.json").is_file() else path
    check_model_folder(folder)
    return folder


def check_model_folder(folder: Path) -> None:
    """Check that a folder has a configuration and a tokenizer.

    Raises:
        ModelError: A file is missing.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} has no {name}, so it is not a Hugging Face model folder with a tokenizer",
                remedy="correct the path, or make the folder from a checkpoint with python -m recipe_gkd export",
                path=folder / name,
            )


def short_names(models: Sequence[str]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other."""
    parts = [model.rstrip("/").removesuffix("/huggingface").split("/") for model in models]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{model} ({number})" for number, model in enumerate(models, start=1)]
