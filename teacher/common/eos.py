"""End-of-sequence ids that the config files of a model declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def declared_eos_ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the EOS ids of a model, one list for each file section that declares any, by precedence.

    An instruct model often declares its end of turn in ``generation_config.json`` only, and the base model's id in
    ``config.json``. A composite model has the ids of its language model in ``text_config``.

    Args:
        generation_config: Contents of ``generation_config.json``; empty if there is no such file.
        config: Contents of ``config.json``; empty if there is no such file.

    Yields:
        Token ids, in the order of the file, duplicates included. A section without ``eos_token_id`` yields nothing.

    Raises:
        ValueError: The value is neither a token id nor a list of token ids.
    """
    for source in (generation_config, config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(token_id) is not int or token_id < 0 for token_id in ids):
            raise ValueError(f"eos_token_id={value!r}, expected a token id or a list of token ids")
        yield ids
