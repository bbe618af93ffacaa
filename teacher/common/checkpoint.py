"""Values read from the files of a checkpoint before the engine is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from teacher.common.eos import declared_eos_ids
from teacher.common.weight_files import find_damaged_weights
from teacher.errors import TeacherSetupError
from teacher.wire.limits import LIMITS

T = TypeVar("T")

_WANTED = "expected a local folder with config.json, weights and tokenizer (Hugging Face format)"


@dataclass(frozen=True)
class Checkpoint:
    """Values of a checkpoint.

    Attributes:
        vocab_size: Rows of the output layer.
        eos_token_ids: Ids that end a turn, ascending.
        n_heads: Attention heads. 0: unknown.
        dtype: Data type of the stored weights. Empty: unknown.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    n_heads: int = 0
    dtype: str = ""

    def check_tp_size(self, tp_size: int) -> None:
        """Check that tensor-parallel ranks can divide the attention heads. vLLM reports it much later.

        Raises:
            TeacherSetupError: ``tp_size`` does not divide their number.
        """
        if self.n_heads % tp_size:
            sizes = [size for size in range(1, self.n_heads + 1) if self.n_heads % size == 0]
            raise TeacherSetupError(
                f"TP_SIZE={tp_size} does not divide the model's {self.n_heads} attention heads",
                options=("TP_SIZE",),
                remedy=f"set TP_SIZE to one of {', '.join(map(str, sizes))}",
            )


def read_checkpoint(folder: Path, option: str = "CKPT_PATH") -> Checkpoint:
    """Validate the files of a checkpoint and read its configuration. An engine reports the same errors much later.

    Args:
        folder: Folder of the checkpoint.
        option: Name of the option or key with the folder, for errors.

    Raises:
        TeacherSetupError: ``folder`` is not a complete checkpoint in Hugging Face format.
    """
    if not folder.is_dir():
        what = f"{option}={folder} is not a folder, {_WANTED}"
        raise TeacherSetupError(what, path=folder, options=(option,), remedy="download it with `hf download`")
    config = _read_json(folder, "config.json", option)
    if config is None:
        what = f"{option}={folder} has no config.json, {_WANTED}"
        raise TeacherSetupError(what, path=folder / "config.json", options=(option,))
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        what = f"{option}={folder} has no weights (*.safetensors or *.bin), {_WANTED}"
        raise TeacherSetupError(what, path=folder, options=(option,))
    if (damage := find_damaged_weights(folder)) is not None:
        what = f"{option}={folder} cannot be served: {damage.what}"
        raise TeacherSetupError(what, path=damage.path, options=(option,), remedy=damage.remedy)
    # Composite models keep the language model's values one level down.
    text_config = config.get("text_config") or {}
    return Checkpoint(
        _vocab_size(config.get("vocab_size") or text_config.get("vocab_size"), folder, option),
        _eos_token_ids(folder, config, option),
        n_heads=_first(int, config, text_config, "num_attention_heads", "n_head"),
        dtype=_first(str, config, text_config, "dtype", "torch_dtype"),
    )


def _first(kind: type[T], config: dict[str, Any], text_config: dict[str, Any], *names: str) -> T:
    """Return the first value of this type under one of the names, or 0 or an empty string."""
    values = (section.get(name) for section in (text_config, config) for name in names)
    return next((value for value in values if isinstance(value, kind)), kind())


def _vocab_size(value: object, folder: Path, option: str) -> int:
    if not isinstance(value, int):
        raise TeacherSetupError(
            f"the model's config.json has no vocab_size, got {value!r}, expected a causal language model",
            path=folder / "config.json",
            options=(option,),
        )
    return value


def read_eos_token_ids(folder: Path, option: str = "CKPT_PATH") -> tuple[int, ...]:
    """Return the ids that end a turn, ascending, of a folder that may have only a tokenizer. Empty: none are declared.

    Args:
        option: Name of the option or key with the folder, for errors.

    Raises:
        TeacherSetupError: A file is invalid.
    """
    return _eos_token_ids(folder, _read_json(folder, "config.json", option) or {}, option)


def _eos_token_ids(folder: Path, config: dict[str, Any], option: str) -> tuple[int, ...]:
    """Return the ids of the first file that declares any; ``generation_config.json`` precedes ``config.json``."""
    generation_config = _read_json(folder, "generation_config.json", option) or {}
    try:
        ids = next(declared_eos_ids(generation_config, config), [])
    except ValueError as error:
        what = f"{option}={folder} has {error} in generation_config.json or config.json"
        raise TeacherSetupError(what, path=folder, options=(option,)) from None
    if len(ids) > LIMITS.eos_token_ids or any(token_id >= LIMITS.vocab_size for token_id in ids):
        raise TeacherSetupError(
            f"{option}={folder} has eos_token_id={ids}, expected a token id or a list of up to "
            f"{LIMITS.eos_token_ids} in generation_config.json or config.json",
            path=folder,
            options=(option,),
        )
    return tuple(sorted(set(ids)))


def _read_json(folder: Path, name: str, option: str) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if there is no such file."""
    try:
        return dict(json.loads((folder / name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        what = f"{option}={folder} is no model: its {name} cannot be read ({error}), {_WANTED}"
        raise TeacherSetupError(what, path=folder / name, options=(option,)) from None
