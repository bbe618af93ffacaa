"""Checks of the student's folder by file names, headers and sizes, before anything is loaded from it."""

from __future__ import annotations

from pathlib import Path

from recipe_gkd.errors import ModelError
from teacher.weight_files import INDEX_NAME, find_damaged_weights

VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
"""Sets of files, one of which holds a tokenizer's vocabulary."""
TOKENIZER_CONFIG = "tokenizer_config.json"


def check_weight_files(folder: Path) -> None:
    """Raise :class:`ModelError` that names the weight file which is missing, empty or truncated."""
    if not (folder / INDEX_NAME).is_file() and not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"actor_rollout_ref.model.path: {folder} has neither model.safetensors nor {INDEX_NAME}; save the model "
            "in that format (save_pretrained does), or copy the folder again"
        )
    if damage := find_damaged_weights(folder):
        raise ModelError(f"actor_rollout_ref.model.path: {damage}")


def check_tokenizer_files(folder: Path) -> None:
    """Raise :class:`ModelError` that names the tokenizer files which are missing.

    Without its vocabulary transformers makes a tokenizer of one id, and without its configuration one with other
    special tokens, and mentions neither.
    """
    missing = [] if (folder / TOKENIZER_CONFIG).is_file() else [TOKENIZER_CONFIG]
    if not any(all((folder / name).is_file() for name in names) for names in VOCABULARIES):
        started = next((names for names in VOCABULARIES if any((folder / name).is_file() for name in names)), None)
        missing += [name for name in started or VOCABULARIES[0] if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"actor_rollout_ref.model.path: {folder} has no {', '.join(missing)}; copy the tokenizer that the student "
            "came with into it (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
