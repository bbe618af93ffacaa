"""Fingerprints: hashes of what prompts are made from. A checkpoint stores them, so that no run resumes with other data.

They are hashes of the inputs, not of token ids: a chat template may print the date, so that the same data has other ids
on the next day. Checkpoints that were made before this have fingerprints without :data:`FORMAT`, which cannot be
compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipe_gkd.data.messages import Message
from recipe_gkd.data.tokenization import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "inputs:"
"""Prefix of fingerprints of prompts. Another one is needed when they are made from other inputs."""


class Fingerprint:
    """Hash of a sequence of values that JSON can represent."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, value: object) -> None:
        """Add a value."""
        self._digest.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")  # JSON has no line feed

    def hexdigest(self) -> str:
        """Return the hash of all values, 32 hexadecimal digits."""
        return self._digest.hexdigest()


class PromptFingerprint(Fingerprint):
    """Hash of prompts, their tools, and the chat templates that format them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *templates: ChatTemplate) -> None:
        """Start with the tokenizer's chat template, and its settings for each model."""
        super().__init__()
        self.add(getattr(tokenizer, "chat_template", None))
        for template in templates:
            self.add([dict(template.kwargs), template.system_prompt])

    def add_prompt(self, prompt: str | list[Message], tools: Sequence[object] | None) -> None:
        """Add a prompt before the chat template, and its tools."""
        self.add(prompt)
        if tools:
            self.add({"tools": tools})

    def hexdigest(self) -> str:
        """Return the prefix :data:`FORMAT` and the hash of all values."""
        return FORMAT + super().hexdigest()


def can_compare(one: str, other: str) -> bool:
    """Return True if both fingerprints exist and are made from the same inputs."""
    return bool(one and other) and one.startswith(FORMAT) == other.startswith(FORMAT)
