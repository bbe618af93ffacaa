"""A submit is cut into pieces, each a request of its own, and its answers are joined again in the order of asking.

Pieces let the service deal work by tokens: several workers share one submit, short sequences do not wait for the long
ones that they were submitted with, and a worker that dies takes little along.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from teacher.client.calls import Call
from teacher.errors import TeacherProtocolError
from teacher.records import ModelInfo, ScoredSequence, TeacherSequence
from teacher.wire import protocol
from teacher.wire.frames import Frame
from teacher.wire.messages import Message, ScoreReply, WireDtype, check_sequences

PIECE_TOKENS = 4096
PIECE_BYTES = 256 << 20
"""Of its answer: a worker keeps the answers of a piece until it has all of them."""


def cut(lengths: Sequence[int], piece_tokens: int = PIECE_TOKENS) -> list[range]:
    """Ranges of consecutive sequences of at most `piece_tokens` together; a longer one is a piece by itself."""
    pieces: list[range] = []
    start = n_tokens = 0
    for i, length in enumerate(lengths):
        if i > start and n_tokens + length > piece_tokens:
            pieces.append(range(start, i))
            start, n_tokens = i, 0
        n_tokens += length
    pieces.append(range(start, len(lengths)))
    return pieces


class Scoring(Call[list[ScoredSequence]]):
    """One submit: a request for each piece."""

    takes_place = True

    def __init__(
        self,
        sequences: Sequence[TeacherSequence],
        timeout_s: float,
        *,
        temperature: float,
        top_k: int | None,
        wire_dtype: WireDtype,
        met: ModelInfo | None,
    ) -> None:
        """`met`: what the service said that it is, if it was asked.

        Raises: TeacherRequestError if they cannot be sent, see `messages.check_sequences`.
        """
        check_sequences(sequences)
        bytes_per_token = 8 * met.n_logprobs if met is not None else 1
        self._pieces = cut(
            [len(sequence.token_ids) for sequence in sequences], min(PIECE_TOKENS, PIECE_BYTES // bytes_per_token)
        )
        super().__init__(f"scoring {len(sequences)} sequences", timeout_s, len(self._pieces))
        self._messages = [
            protocol.encode_score(
                0,
                timeout_s,
                sequences[piece.start : piece.stop],
                temperature,
                top_k=top_k,
                wire_dtype=wire_dtype,
                model=met.identity if met is not None else "",
            )
            for piece in self._pieces
        ]
        self._n_rows = [len(sequence.token_ids) - sequence.prompt_len for sequence in sequences]
        self._n_columns = top_k  # None until the first answer shows it
        self._answers: dict[int, ScoredSequence] = {}

    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        return protocol.readdress(self._messages[self._index(request_id)], request_id, timeout_s)

    def accept(self, request_id: int, message: Message) -> None:
        piece = self._pieces[self._index(request_id)]
        if not isinstance(message, ScoreReply):
            raise TeacherProtocolError(f"expected ScoreReply, got {type(message).__name__}")
        if len(message.scored) != len(piece):
            raise TeacherProtocolError(f"asked for {len(piece)} sequences, got answers for {len(message.scored)}")
        for i, answer in zip(piece, message.scored, strict=True):
            self._check_size(i, answer)
            self._answers[i] = _in_float32(answer)
        self._messages[self._index(request_id)] = []  # never needed again, and the rest may take long
        if len(self._answers) == len(self._n_rows):
            self.succeed([self._answers[i] for i in range(len(self._n_rows))])

    def explain(self, request_id: int, text: str) -> str:
        start = self._pieces[self._index(request_id)].start
        return re.sub(r"\bsequence (\d+):", lambda found: f"sequence {int(found[1]) + start}:", text, count=1)

    def _index(self, request_id: int) -> int:
        return request_id - self.request_ids.start

    def _check_size(self, i: int, answer: ScoredSequence) -> None:
        n_rows, n_columns = answer.topk_logps_TK.shape
        if self._n_columns is None:
            self._n_columns = n_columns
        if (n_rows, n_columns) != (self._n_rows[i], self._n_columns):
            raise TeacherProtocolError(
                f"sequence {i}: expected [T, K] = {[self._n_rows[i], self._n_columns]}, got {[n_rows, n_columns]}"
            )


def _in_float32(answer: ScoredSequence) -> ScoredSequence:
    logps_TK = answer.topk_logps_TK.astype(np.float32, copy=False)
    return ScoredSequence(logps_TK, answer.topk_ids_TK, answer.sampled_logps_T)
