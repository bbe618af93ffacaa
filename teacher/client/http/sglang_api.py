"""Format of an SGLang server: ``/generate`` with ``return_logprob``.

``input_token_logprobs`` and ``input_top_logprobs`` have one entry for each token from ``logprob_start_len`` on. An
entry is ``[log-probability, id, text or null]``, or a list of them. The first one has no log-probability (null): the
server computes no distribution for it. So a request starts at the token before the first scored one.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import numpy as np

from teacher.client.http.scoring_api import as_top_k, decode
from teacher.errors import TeacherProtocolError
from teacher.records import ScoredSequence, TeacherSequence

_Entry = tuple[float | None, int, str | None]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Entry] | None = None
    input_top_logprobs: list[list[_Entry] | None] | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta


class SglangApi:
    """Endpoint ``/generate``. It returns positions from the first scored one on."""

    path = "/generate"
    limit_flag = ""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Generated)

    def body(self, sequence: TeacherSequence, top_k: int, model: str) -> dict[str, Any]:
        """Return the body of a request; see `ScoringApi`. The server has one model."""
        return {
            "input_ids": sequence.token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": sequence.first_scored - 1,
            "top_logprobs_num": top_k,
            "return_text_in_logprobs": False,
        }

    def scores(self, content: bytes, sequence: TeacherSequence, top_k: int) -> ScoredSequence:
        """Return the scores of a response; see `ScoringApi`."""
        meta: _Meta = decode(content, self._decoder).meta_info
        response = sequence.token_ids[sequence.first_scored :]
        tokens, rows = meta.input_token_logprobs or [], meta.input_top_logprobs or []
        if len(tokens) != len(response) + 1 or len(rows) != len(tokens):
            raise TeacherProtocolError(
                f"input_token_logprobs of {len(tokens)} and input_top_logprobs of {len(rows)} positions, expected "
                f"{len(response) + 1}: the response and the token before it",
                entry="input_token_logprobs",
            )
        if [token for _, token, _ in tokens[1:]] != response.tolist():
            raise TeacherProtocolError(
                "input_token_logprobs has other ids than the response at its positions", entry="input_token_logprobs"
            )
        at_T = (sequence.scored_positions_T - sequence.first_scored + 1).tolist()
        entries = list(chain.from_iterable(rows[at] or [] for at in at_T))
        logps_N = np.array([logp for logp, _, _ in entries], np.float32)
        ids_N = np.array([token for _, token, _ in entries], np.int32)
        logps_TK, ids_TK = as_top_k(logps_N, ids_N, len(at_T), top_k)
        return ScoredSequence(logps_TK, ids_TK, np.array([tokens[at][0] for at in at_T], np.float32))
