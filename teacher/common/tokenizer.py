"""Tokenizer of a checkpoint. The service uses only its vocabulary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from teacher.common.fingerprint import count_ids
from teacher.errors import TeacherSetupError

logger = logging.getLogger(__name__)


def load_tokenizer(ckpt_path: str, option: str = "CKPT_PATH") -> Any:
    """Return the transformers tokenizer of a checkpoint folder.

    Args:
        ckpt_path: The folder.
        option: Name of the option or key with the folder, for errors.

    Raises:
        TeacherSetupError: The tokenizer files are missing or invalid.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(ckpt_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise TeacherSetupError(
            f"the tokenizer in {option}={ckpt_path} cannot be loaded: {error}",
            path=Path(ckpt_path),
            options=(option,),
            remedy="copy the tokenizer files that the model came with into the folder",
        ) from None


def count_tokens(tokenizer: Any, vocab_size: int) -> int:
    """Return the number of ids of the output layer that are tokens. The rest is padding.

    Args:
        vocab_size: Rows of the output layer.
    """
    n_ids = count_ids(tokenizer)
    if n_ids > vocab_size:
        logger.warning(
            "the teacher's tokenizer has ids up to %d, but its model's output layer has %d rows: sequences with ids "
            "from %d on will be rejected; check that the tokenizer belongs to this model",
            n_ids - 1,
            vocab_size,
            vocab_size,
        )
    return min(n_ids, vocab_size)
