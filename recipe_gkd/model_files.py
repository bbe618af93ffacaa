"""The student's model folder: its properties, and checks of its files by names, headers and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.errors import ModelError
from teacher.weight_files import INDEX_NAME, find_damaged_weights

VOCABULARY_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
"""Alternative sets of files. A tokenizer needs one complete set."""
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Student:
    """Properties of the student's model folder that the driver needs.

    Attributes:
        path: Model folder.
        vocab_size: Number of rows of the output layer.
        tokenizer: Tokenizer of the student.
        fingerprint: Hash of the tokenizer's vocabulary; see :mod:`teacher.fingerprint`.
        n_tokens: Number of ids of the tokenizer. Rows of the output layer from ``n_tokens`` on are padding.
    """

    path: Path
    vocab_size: int
    tokenizer: Any
    fingerprint: str
    n_tokens: int


def check_weight_files(folder: Path) -> None:
    """Check that the weight files are complete.

    Raises:
        ModelError: A weight file is missing, empty or truncated; the message names it.
    """
    if not (folder / INDEX_NAME).is_file() and not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"actor_rollout_ref.model.path: {folder} has neither model.safetensors nor {INDEX_NAME}; save the model "
            "with save_pretrained, or copy the folder again"
        )
    if damage := find_damaged_weights(folder):
        raise ModelError(f"actor_rollout_ref.model.path: {damage}")


def check_tokenizer_files(folder: Path) -> None:
    """Check that the tokenizer files exist.

    Without the vocabulary, transformers silently makes a tokenizer with one id. Without the configuration, it silently
    makes one with other special tokens.

    Raises:
        ModelError: Tokenizer files are missing; the message names them.
    """
    missing = [] if (folder / TOKENIZER_CONFIG).is_file() else [TOKENIZER_CONFIG]
    if not any(all((folder / name).is_file() for name in names) for names in VOCABULARY_FILES):
        incomplete = next(
            (names for names in VOCABULARY_FILES if any((folder / name).is_file() for name in names)), None
        )
        missing += [name for name in incomplete or VOCABULARY_FILES[0] if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"actor_rollout_ref.model.path: {folder} has no {', '.join(missing)}; save the "
            "student's original tokenizer there (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
