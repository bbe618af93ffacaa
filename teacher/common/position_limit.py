"""Maximum sequence length of a model, which families name in several ways."""

from __future__ import annotations

from typing import Any

POSITION_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Names of the maximum sequence length. vLLM takes the smallest too (``derive_max_model_len_and_key``)."""
NO_LIMIT = 2**31 - 1


def position_limit(text_config: Any) -> int:
    """Return the maximum sequence length of a transformers configuration of a text model; ``NO_LIMIT`` without one."""
    values = (getattr(text_config, name, None) for name in POSITION_KEYS)
    return min((value for value in values if isinstance(value, int) and value > 0), default=NO_LIMIT)
