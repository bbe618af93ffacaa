"""Version of the protocol, and the limits of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PROTOCOL_VERSION = 11
"""Peers of different versions refuse each other. A peer that ignores a field would return scores of another request."""

WireDtype = Literal["float32", "float16"]
"""Dtype of top-k log-probabilities on the wire."""


@dataclass(frozen=True)
class Limits:
    """Limits of one message. They bound memory and are far above every useful request.

    Attributes:
        header_bytes: Size of an encoded header. A request of 4096 sequences needs 200 kB. A small msgpack item, such as
            an empty list of one byte, takes 64 times its size in memory after decoding.
        text_chars: Length of one text field.
        list_texts: Texts of one list, such as the further lines of an error. The header of an error with the longest
            texts of four bytes per character has 400 kB.
        list_text_chars: Length of one text of a list.
        status_bytes: Size of an encoded service status.
        sequences: Sequences of one request.
        sequence_tokens: Tokens of one sequence.
        request_tokens: Tokens of one request.
        request_support_ids: Support ids of one request, over all positions.
        vocab_size: Vocabulary size, and size of each array dimension.
        eos_token_ids: End-of-sequence tokens of one model.
        last_tokens: Last tokens of one tokenizer, each of at most 1024 characters.
        request_frame_bytes: Size of a frame sent to a worker: the token ids of one sequence, its support ids, or its
            scored ranges.
        reply_frame_bytes: Size of a frame sent to a client: 1M tokens with top-4096, or 16k tokens with the whole
            vocabulary of 256k tokens.
        timeout_s: Deadline of a request, in seconds.
        stall_timeout_s: Time limit of an engine step, in seconds.
        min_temperature: Lowest temperature. Below it a distribution is one token, and scaled logits may overflow fp32.
        max_temperature: Highest temperature. Above it a distribution is uniform.
    """

    header_bytes: int = 512 << 10
    text_chars: int = 16 << 10
    list_texts: int = 16
    list_text_chars: int = 1024
    status_bytes: int = 1 << 20
    sequences: int = 4096
    sequence_tokens: int = 1 << 20
    request_tokens: int = 16 << 20
    request_support_ids: int = 64 << 20
    vocab_size: int = 1 << 24
    eos_token_ids: int = 256
    last_tokens: int = 1024
    request_frame_bytes: int = 256 << 20
    reply_frame_bytes: int = 16 << 30
    timeout_s: float = 7 * 24 * 3600.0
    stall_timeout_s: float = 1e6
    min_temperature: float = 1e-6
    max_temperature: float = 1e6

    @property
    def frames(self) -> int:
        """Frames of one message: the header, and at most three arrays for each sequence."""
        return 1 + 3 * self.sequences


LIMITS = Limits()
