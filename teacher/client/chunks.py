"""Split a submission into chunks, each a separate request, and join the replies in the original order.

Chunks let the service balance work by tokens. Several workers share one submission, short sequences do not wait for
long ones of the same submission, and a worker that dies loses little work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from teacher.client.arguments import normalize_sequences
from teacher.client.calls import Call
from teacher.errors import TeacherError, TeacherProtocolError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherSequence
from teacher.wire import protocol
from teacher.wire.frames import Frame
from teacher.wire.limits import WireDtype
from teacher.wire.messages import Message, Score, ScoreReply
from teacher.wire.request_checks import check_sequences, check_top_k

CHUNK_TOKENS = 4096
MAX_CHUNK_REPLY_BYTES = 256 << 20  # a worker keeps the results of a chunk in memory until the chunk is complete
_BYTES_PER_LOGPROB = 8  # float32 log-probability and int32 token id


def split_request(lengths: Sequence[int], chunk_tokens: int = CHUNK_TOKENS) -> list[range]:
    """Return ranges of consecutive sequences with at most ``chunk_tokens`` tokens each.

    A sequence that is longer than ``chunk_tokens`` becomes its own chunk.

    Args:
        lengths: Number of tokens of each sequence.
        chunk_tokens: Maximum number of tokens of a chunk.
    """
    chunks: list[range] = []
    start = n_tokens = 0
    for i, length in enumerate(lengths):
        if i > start and n_tokens + length > chunk_tokens:
            chunks.append(range(start, i))
            start, n_tokens = i, 0
        n_tokens += length
    chunks.append(range(start, len(lengths)))
    return chunks


class ScoreCall(Call[list[ScoredSequence]]):
    """The call of `TeacherClient.submit`: one request per chunk."""

    uses_queue = True

    def __init__(
        self,
        sequences: Iterable[TeacherSequence],
        timeout_s: float,
        *,
        logits: LogitSettings,
        top_k: int | None,
        wire_dtype: WireDtype,
        model: ModelInfo | None,
        as_float32: bool = True,
    ) -> None:
        """Split and encode the sequences.

        Args:
            sequences: Sequences to score.
            timeout_s: Time limit, in seconds.
            logits: Temperature, and number of ids with a probability.
            top_k: Log-probabilities per position, or None for all that the service returns.
            wire_dtype: Type of the log-probabilities on the wire.
            model: Model that the service must serve, from `TeacherClient.hello`. None accepts any model.
            as_float32: Convert the log-probabilities to float32. Otherwise they keep ``wire_dtype``.

        Raises:
            TeacherRequestError: The sequences cannot be sent. ``sequence`` and ``argument`` of the error are set.
        """
        sequences = normalize_sequences(sequences)
        check_sequences(sequences)
        n_support = max(sequence.n_support for sequence in sequences)
        n_columns = n_support + (model.n_logprobs if model is not None else 0)
        reply_bytes_per_token = max(1, _BYTES_PER_LOGPROB * n_columns)
        self._chunks = split_request(
            [len(sequence.token_ids) for sequence in sequences],
            max(1, min(CHUNK_TOKENS, MAX_CHUNK_REPLY_BYTES // reply_bytes_per_token)),
        )
        super().__init__(f"scoring {len(sequences)} sequences", timeout_s, len(self._chunks))
        self._messages = [
            protocol.encode(
                Score(
                    0,
                    timeout_s,
                    sequences[chunk.start : chunk.stop],
                    logits,
                    top_k=check_top_k(top_k),
                    wire_dtype=wire_dtype,
                    model=model.identity if model is not None else "",
                )
            )
            for chunk in self._chunks
        ]
        self._shapes = [(sequence.n_scored, sequence.with_top_k, sequence.n_support) for sequence in sequences]
        self._top_k = top_k  # None until the first reply
        self._scored: dict[int, ScoredSequence] = {}
        self._as_float32 = as_float32

    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        """Return the message of one chunk."""
        return protocol.readdress(self._messages[self._index(request_id)], request_id, timeout_s)

    def accept(self, request_id: int, message: Message) -> None:
        """Store the scores of one chunk, and resolve the call with the last one.

        Raises:
            TeacherProtocolError: The reply has another type, or its number of sequences or shape is wrong.
        """
        chunk = self._chunks[self._index(request_id)]
        if not isinstance(message, ScoreReply):
            raise TeacherProtocolError(f"expected {ScoreReply.__name__}, got {type(message).__name__}", entry="kind")
        if len(message.scored) != len(chunk):
            raise TeacherProtocolError(
                f"sent {len(chunk)} sequences, got scores of {len(message.scored)}", entry="arrays"
            )
        for i, scored in zip(chunk, message.scored, strict=True):
            self._check_shape(i, scored)
            self._scored[i] = _to_float32(scored) if self._as_float32 else scored
        self._messages[self._index(request_id)] = []  # free the memory: the other chunks can take long
        if len(self._scored) == len(self._shapes):
            self.succeed([self._scored[i] for i in range(len(self._shapes))])

    def locate_error(self, request_id: int, error: TeacherError) -> TeacherError:
        """Return an error whose sequence has its position in the whole call instead of the position in the chunk."""
        if error.sequence is None:
            return error
        return error.replaced(sequence=error.sequence + self._chunks[self._index(request_id)].start)

    def _index(self, request_id: int) -> int:
        return request_id - self.request_ids.start

    def _check_shape(self, i: int, scored: ScoredSequence) -> None:
        n_scored, with_top_k, n_support = self._shapes[i]
        if with_top_k and self._top_k is None:
            self._top_k = scored.topk_ids_TK.shape[1]
        support_TJ = scored.support_logps_TJ
        expected = [n_scored, self._top_k if with_top_k else 0, n_support]
        got = [*scored.topk_ids_TK.shape, 0 if support_TJ is None else support_TJ.shape[1]]
        if got != expected:
            raise TeacherProtocolError(f"expected [T, K, J] = {expected}, got {got}", sequence=i)


def _to_float32(scored: ScoredSequence) -> ScoredSequence:
    return scored.reduced(0, "float32")
