"""Values read from the files of a checkpoint before the engine is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teacher.errors import TeacherError
from teacher.weight_files import find_damaged_weights
from teacher.wire.messages import LIMITS

_WANTED = "expected a local folder with config.json, weights and tokenizer (Hugging Face format)"


@dataclass(frozen=True)
class Checkpoint:
    """Values of a checkpoint.

    Attributes:
        vocab_size: Rows of the output layer.
        eos_token_ids: Ids that end a turn, ascending.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Validate the files of a checkpoint and read its configuration. An engine reports the same errors much later.

    Raises:
        TeacherError: ``folder`` is not a complete checkpoint in Hugging Face format.
    """
    if not folder.is_dir():
        raise TeacherError(f"CKPT_PATH={folder} is not a folder; {_WANTED}; download it with `hf download`")
    config = _read_json(folder, "config.json")
    if config is None:
        raise TeacherError(f"CKPT_PATH={folder} has no config.json; {_WANTED}")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise TeacherError(f"CKPT_PATH={folder} has no weights (*.safetensors or *.bin); {_WANTED}")
    if (damage := find_damaged_weights(folder)) is not None:
        raise TeacherError(f"CKPT_PATH={folder} cannot be served: {damage}")
    # Composite models keep the language model's values one level down.
    text_config = config.get("text_config") or {}
    return Checkpoint(
        _vocab_size(config.get("vocab_size") or text_config.get("vocab_size")),
        _eos_token_ids(folder, config, text_config),
    )


def _vocab_size(value: object) -> int:
    if not isinstance(value, int):
        raise TeacherError(
            f"the model's config.json has no vocab_size, got {value!r}; expected a causal language model"
        )
    return value


def _eos_token_ids(folder: Path, config: dict[str, Any], text_config: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json goes first: an instruct model often ends its turns there, its config names the base's."""
    generation_config = _read_json(folder, "generation_config.json") or {}
    for source in (generation_config, config, text_config):
        if (value := source.get("eos_token_id")) is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if len(ids) > LIMITS.eos_token_ids or any(type(i) is not int or not 0 <= i < LIMITS.vocab_size for i in ids):
            raise TeacherError(
                f"CKPT_PATH={folder} has eos_token_id={value!r}; expected a token id or a list of up to "
                f"{LIMITS.eos_token_ids} in generation_config.json or config.json"
            )
        return tuple(sorted(set(ids)))
    return ()


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """None if there is no such file."""
    try:
        return dict(json.loads((folder / name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise TeacherError(f"CKPT_PATH={folder} is no model: its {name} cannot be read ({error}); {_WANTED}") from None
