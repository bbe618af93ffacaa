"""Records of the teacher service: a sequence to score, its scores, and a description of the model.

Shape suffixes: N tokens of a whole sequence, T response positions, K the request's ``top_k`` (all ``n_logprobs`` by
default), J support ids of a position, which the client selects, R ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from teacher.wire.fields import MAX_COUNT, Count, Integer, ListOf, Name, Record
from teacher.wire.limits import LIMITS, WireDtype


@dataclass(frozen=True, eq=False, init=False)
class TeacherSequence:
    """A prompt with its response, or a conversation.

    Example: prompt ``[9, 8, 7]`` and response ``[5, 6]``, of which T = 2 tokens are scored::

        TeacherSequence([9, 8, 7, 5, 6], prompt_len=3)

    The teacher's distributions at the ids 5, 2 and 6, 1, such as the likeliest ids of a student, without the teacher's
    own top k::

        TeacherSequence([9, 8, 7, 5, 6], prompt_len=3, support_ids_TJ=[[5, 2], [6, 1]], with_top_k=False)

    A conversation of which the turns 5, 6 and 1, 2 are scored, and 4 between them is not::

        TeacherSequence([9, 8, 7, 5, 6, 4, 1, 2], prompt_len=3, scored_ranges=[[3, 5], [6, 8]])

    Attributes:
        token_ids: Prompt followed by response, int32 [N]. The ids are from the teacher's tokenizer.
        prompt_len: Number of prompt tokens, 1 <= prompt_len < N.
        scored_ranges: Ranges [start, end) of the T tokens that are scored, after the prompt, ascending and disjoint,
            int32 [R, 2]. None: all tokens after the prompt, T = N - prompt_len.
        support_ids_TJ: Further ids to score at each scored position, int32 [T, J], distinct in a row; -1 for an
            unused entry. None: no further ids.
        with_top_k: Score the teacher's top k. Without support ids it must be True.
    """

    token_ids: np.ndarray
    prompt_len: int
    support_ids_TJ: np.ndarray | None
    with_top_k: bool
    scored_ranges: np.ndarray | None

    def __init__(
        self,
        token_ids: np.ndarray | Sequence[int],
        prompt_len: int,
        *,
        scored_ranges: np.ndarray | Sequence[Sequence[int]] | None = None,
        support_ids_TJ: np.ndarray | Sequence[Sequence[int]] | None = None,
        with_top_k: bool = True,
    ) -> None:
        """Store the sequence. Values are checked when a client sends it, so that the error has its index.

        Args:
            token_ids: Array [N], which is not copied, or a plain list of N ids.
            prompt_len: Number of prompt tokens.
            scored_ranges: Array [R, 2], which is not copied, or lists of start and end.
            support_ids_TJ: Array [T, J], which is not copied, or lists of ids.
            with_top_k: Score the teacher's top k.
        """
        if not isinstance(token_ids, np.ndarray):
            token_ids = _as_array(token_ids)
        if support_ids_TJ is not None and not isinstance(support_ids_TJ, np.ndarray):
            support_ids_TJ = _as_array(support_ids_TJ)
        if scored_ranges is not None and not isinstance(scored_ranges, np.ndarray):
            scored_ranges = _as_array(scored_ranges)
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "prompt_len", prompt_len)
        object.__setattr__(self, "support_ids_TJ", support_ids_TJ)
        object.__setattr__(self, "with_top_k", with_top_k)
        object.__setattr__(self, "scored_ranges", scored_ranges)

    @property
    def n_scored(self) -> int:
        """Number of scored positions T."""
        if self.scored_ranges is None:
            return len(self.token_ids) - self.prompt_len
        return int((self.scored_ranges[:, 1] - self.scored_ranges[:, 0]).sum())

    @property
    def first_scored(self) -> int:
        """Position of the first token that is scored."""
        return self.prompt_len if self.scored_ranges is None else int(self.scored_ranges[0, 0])

    @property
    def scored_positions_T(self) -> np.ndarray:
        """Positions of the tokens that are scored, ascending, int64 [T]."""
        if self.scored_ranges is None:
            return np.arange(self.prompt_len, len(self.token_ids))
        return np.concatenate([np.arange(start, end) for start, end in self.scored_ranges.tolist()])

    @property
    def scored_ids_T(self) -> np.ndarray:
        """Tokens that are scored, int32 [T]. A view of ``token_ids`` if they are all tokens after the prompt."""
        if self.scored_ranges is None:
            return self.token_ids[self.prompt_len :]
        return self.token_ids[self.scored_positions_T]

    @property
    def n_support(self) -> int:
        """Number of support ids of a position J."""
        return 0 if self.support_ids_TJ is None else self.support_ids_TJ.shape[1]


def _as_array(token_ids: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray:
    """Return ids as int32. Values that are no ids keep a type that the client's checks refuse."""
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError):  # such as lists of unequal lengths
        return np.array([None], object)
    fits = ids.dtype.kind in "iu" and ids.size > 0 and ids.min() >= -(1 << 31) and ids.max() < 1 << 31
    return ids.astype(np.int32) if fits or ids.shape == (0,) else ids


@dataclass(frozen=True, eq=False)
class ScoredSequence:
    """The teacher's distributions at the scored positions of one sequence.

    Row r is ``log_softmax(logits / temperature)`` over the whole vocabulary in fp32, for the logits that predict
    scored token r from all tokens before it. The logits are the model's final ones (after soft cap and scale). The
    temperature of the request, 1 by default, applies to all arrays.

    Attributes:
        topk_logps_TK: Natural log-probabilities in descending order, float32 [T, K]. K is 0 for a sequence without
            ``with_top_k``.
        topk_ids_TK: Token ids of these log-probabilities, int32 [T, K].
        sampled_logps_T: Log-probability of the token in the sequence, which need not be in the top k, float32 [T].
        support_logps_TJ: Log-probabilities of the sequence's support ids, in their order, float32 [T, J]; -inf for an
            unused entry. None for a sequence without them.
    """

    topk_logps_TK: np.ndarray
    topk_ids_TK: np.ndarray
    sampled_logps_T: np.ndarray
    support_logps_TJ: np.ndarray | None = None

    def reduced(self, top_k: int, dtype: WireDtype) -> ScoredSequence:
        """Return the first ``top_k`` columns, 0 for all, with log-probabilities of a dtype. Whole arrays are shared."""
        if top_k in (0, self.topk_logps_TK.shape[1]) and self.topk_logps_TK.dtype == dtype:
            return self
        columns, support_TJ = slice(top_k or None), self.support_logps_TJ
        return ScoredSequence(
            self.topk_logps_TK[:, columns].astype(dtype, copy=False),
            self.topk_ids_TK[:, columns],
            self.sampled_logps_T,
            None if support_TJ is None else support_TJ.astype(dtype, copy=False),
        )


@dataclass(frozen=True)
class LogitSettings:
    """Settings of a request that determine how distributions are computed from the logits.

    Attributes:
        temperature: Divisor of the logits.
        n_ids: Number of ids that have a probability, from 0 on. Logits of the other ids are excluded before the
            softmax. 0: all ids of the model's tokenizer.
    """

    temperature: float = 1.0
    n_ids: int = 0


@dataclass(frozen=True)
class LastToken:
    """One of the last tokens of a vocabulary.

    Attributes:
        id: Id of the token.
        text: Text of the token in the vocabulary.
        fingerprint: Fingerprint of all tokens with smaller ids; see ``teacher.common.fingerprint``.
    """

    id: Annotated[int, Integer(0, LIMITS.vocab_size)]
    text: Name
    fingerprint: Name


@dataclass(frozen=True)
class ModelInfo:
    """Description of a model. All workers of one service must have the same one.

    Attributes:
        vocab_size: Size of the model's output layer.
        n_tokens: Ids of the tokenizer, 0 to n_tokens - 1. The remaining rows of the output layer are padding: they have
            probability 0 and are never returned, and a sequence that contains them is refused.
        tokenizer_fingerprint: See ``teacher.common.fingerprint``.
        max_model_len: Longest sequence (prompt and response) that is scored, in tokens.
        n_logprobs: Largest ``top_k`` of a request, and largest number of support ids of a position.
        engine: Engine, version and dtype, for display.
        eos_token_ids: Ids that end a turn of this model, ascending. Empty if the model's files name none.
        last_tokens: Last tokens of the tokenizer, by id. Empty if they are unknown.
    """

    model_name: Name
    vocab_size: Count
    n_tokens: Count
    tokenizer_fingerprint: Name
    max_model_len: Count
    n_logprobs: Count
    engine: Name
    eos_token_ids: Annotated[tuple[int, ...], ListOf(Integer(0, LIMITS.vocab_size - 1), LIMITS.eos_token_ids)]
    last_tokens: Annotated[tuple[LastToken, ...], ListOf(Record(LastToken), LIMITS.last_tokens)] = field(
        default=(), kw_only=True
    )

    def shown(self) -> dict[str, str]:
        """Return the values as text by name; of the last tokens, only the last one."""
        values = {name: str(value) for name, value in vars(self).items()}
        last = self.last_tokens[-1] if self.last_tokens else None
        return values | {"last_tokens": "" if last is None else f"... {last.id} {last.text!r}"}

    @property
    def identity(self) -> str:
        """Properties that a client relies on, as text. A service with another identity refuses its requests."""
        return (
            f"{self.model_name}, {self.n_tokens} tokens of tokenizer {self.tokenizer_fingerprint[:23]}, "
            f"top {self.n_logprobs}, up to {self.max_model_len} tokens long"
        )


@dataclass(frozen=True)
class TeacherInfo(ModelInfo):
    """Description of a running service.

    Attributes:
        protocol_version: Protocol version of the proxy.
        n_workers: Number of registered workers.
    """

    protocol_version: Count
    n_workers: Annotated[int, Integer(0, MAX_COUNT)]
