"""The student's model folder: its properties, and checks of its files by names, headers and sizes.

Shape suffixes: V rows of the output layer, D hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe_gkd.config.keys import MODEL_PATH
from recipe_gkd.errors import ModelError
from teacher.common.weight_files import INDEX_NAME, find_damaged_weights, open_weights, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARY_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
"""Alternative sets of files. A tokenizer needs one complete set."""
TOKENIZER_CONFIG = "tokenizer_config.json"
OUTPUT_LAYER = "lm_head.weight"
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|embedding)\.weight$")
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Student:
    """Properties of the student's model folder that the driver needs.

    Attributes:
        path: Model folder.
        vocab_size: Number of rows of the output layer.
        fingerprint: Hash of the tokenizer's vocabulary; see :mod:`teacher.common.fingerprint`.
        n_tokens: Number of ids of the tokenizer. Rows of the output layer from ``n_tokens`` on are padding.
    """

    path: Path
    vocab_size: int
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    n_tokens: int


def find_model(name: str, key: str = MODEL_PATH) -> Path:
    """Return the folder of a model.

    Args:
        name: Path of a folder, or name of a hub model that ``hf download`` has put into the local cache.
        key: Configuration key or option of the name, for messages.

    Raises:
        ModelError: There is no such folder, or it has no ``config.json``.
    """
    path = Path(name)
    if not path.is_dir() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError as error:
            raise ModelError(
                f"{key}={name} is neither a folder (seen from {Path.cwd()}) nor in the local hub cache",
                remedy=f"give a folder, or run: hf download {name}",
                path=Path(name),
            ) from error
    if not (path / "config.json").is_file():
        found = "does not exist" if not path.exists() else "has no config.json"
        raise ModelError(
            f"{key}={name}: {path.absolute()} {found}; expected a Hugging Face model folder with config.json, "
            "tokenizer and safetensors",
            path=path,
            names=("config.json",) if path.exists() else (),
        )
    return path


def check_weight_files(folder: Path) -> None:
    """Check that the weight files are complete.

    Raises:
        ModelError: A weight file is missing, empty or truncated.
    """
    if not (folder / INDEX_NAME).is_file() and not (folder / "model.safetensors").is_file():
        raise ModelError(
            f"actor_rollout_ref.model.path: {folder} has neither model.safetensors nor {INDEX_NAME}",
            remedy="save the model with save_pretrained, or copy the folder again",
            path=folder,
            names=("model.safetensors", INDEX_NAME),
        )
    if damage := find_damaged_weights(folder):
        raise ModelError(f"actor_rollout_ref.model.path: {damage}", path=folder)


def check_tied_output_layer(folder: Path) -> None:
    """Check that the folder of a tied model does not store another output layer than its embedding.

    The actor ties them, as ``config.json`` requires. vLLM compares the stored tensors and unties them, so the engines
    would generate with an output layer that no weight sync updates.

    Args:
        folder: Folder whose ``config.json`` ties the output layer to the embedding, and whose weight files are intact.

    Raises:
        ModelError: The stored tensors differ.
    """
    places: dict[str, Path] = {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            places |= dict.fromkeys(file.keys(), path)
    heads = [name for name in places if name == OUTPUT_LAYER or name.endswith(f".{OUTPUT_LAYER}")]
    embeddings = [name for name in places if EMBEDDING.search(name)]
    if len(heads) != 1 or len(embeddings) != 1 or _are_equal(places, heads[0], embeddings[0]):
        return
    raise ModelError(
        f"actor_rollout_ref.model.path: {folder}/config.json has tie_word_embeddings=true, but the weight files store "
        f"{heads[0]} with other values than {embeddings[0]}",
        remedy="set tie_word_embeddings to false in config.json if the stored output layer is right, or else remove it "
        "from the weight files",
        path=folder,
        names=(heads[0], embeddings[0]),
    )


def _are_equal(places: Mapping[str, Path], first: str, second: str) -> bool:
    """Return True if two stored matrices [V, D] are equal. A part of their rows is in memory at a time."""
    with open_weights(places[first], "pt") as left, open_weights(places[second], "pt") as right:
        a_VD, b_VD = left.get_slice(first), right.get_slice(second)
        n_rows, *_ = shape = a_VD.get_shape()
        starts = range(0, n_rows, _ROWS_AT_ONCE)
        return shape == b_VD.get_shape() and all(
            bool((a_VD[start : start + _ROWS_AT_ONCE] == b_VD[start : start + _ROWS_AT_ONCE]).all()) for start in starts
        )


def check_tokenizer_files(folder: Path) -> None:
    """Check that the tokenizer files exist.

    Without the vocabulary, transformers silently makes a tokenizer with one id. Without the configuration, it silently
    makes one with other special tokens.

    Raises:
        ModelError: Tokenizer files are missing. ``names`` has them.
    """
    missing = [] if (folder / TOKENIZER_CONFIG).is_file() else [TOKENIZER_CONFIG]
    if not any(all((folder / name).is_file() for name in names) for names in VOCABULARY_FILES):
        incomplete = next(
            (names for names in VOCABULARY_FILES if any((folder / name).is_file() for name in names)), None
        )
        missing += [name for name in incomplete or VOCABULARY_FILES[0] if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{MODEL_PATH}: {folder} has no {', '.join(missing)}",
            remedy="save the student's original tokenizer there "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))",
            path=folder,
            names=tuple(missing),
        )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder.

    Args:
        trust_remote_code: True to run the folder's Python code.

    Raises:
        ModelError: The tokenizer files are missing or invalid.
    """
    from transformers import AutoTokenizer

    if not trust_remote_code:  # custom code may read tokenizer files of other names
        check_tokenizer_files(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the tokenizer in {folder} cannot be loaded: {error}",
            remedy="copy the original tokenizer files of the model into the folder",
            path=folder,
        ) from error
    return tokenizer
