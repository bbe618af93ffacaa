"""Records of one sample: its prompt, its response and the teacher's scores.

Arrays belong to one sample and are not padded until the actor packs them.
Axes: P prompt tokens, T response tokens, K ids of the support (the teacher's top-k by default), J ids of the student,
N tokens between the turns of a conversation, X the layers and experts of a token.

In a conversation with several turns, the response tokens are what the student sampled in all turns. Everything that
counts response tokens (losses, metrics, weights, positions) therefore leaves out what others inserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from recipe_gkd.data.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenized prompt at its position in the run.

    Attributes:
        uid: Index of the sample in the run, starting at 0. The ``rollout.n`` samples of one prompt have different uids.
        ids: Token ids, int32 [P].
        row: Index of the data set's row, which contains the other columns.
        reference_ids: Token ids of the reference response that is trained on (``gkd.sft_share``, ``gkd.warmup_steps``),
            int32 [T]. None if a response is sampled.
        teacher_ids: Token ids of the prompt after which the teacher scores the response, int32 [P]. None: ``ids``.
        weights: Weights of the first response tokens, of which the last is that of all later ones
            (``gkd.position_weights_key``), float32 [N]. None: 1.
    """

    uid: int
    ids: np.ndarray
    row: int
    reference_ids: np.ndarray | None = None
    teacher_ids: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def ids_for_teacher(self) -> np.ndarray:
        """Token ids of the prompt that the teacher sees, int32 [P]."""
        return self.ids if self.teacher_ids is None else self.teacher_ids


@dataclass(frozen=True, kw_only=True)
class InsertedTokens:
    """Tokens of a conversation that the student did not sample: messages of tools and users, and parts of the template.

    Attributes:
        ids_N: Token ids, int32 [N].
        before_N: Index of the response token that follows each of them, from 0 to T - 1, ascending, int32 [N].
    """

    ids_N: np.ndarray
    before_N: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """Place in a conversation where the chat template has changed its history (``rollout.history=rewrite``).

    Attributes:
        before: Index of the first response token behind it, from 1 to T - 1.
        context_ids: All tokens before this one, int32 [P].
        routed_experts_PX: Experts of the sequence that begins with ``context_ids``; see :class:`Response`.
    """

    before: int
    context_ids: np.ndarray
    routed_experts_PX: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response sampled by a rollout worker, or the reference response of the data.

    Attributes:
        uid: Index of the sample in the run.
        ids: Token ids, int32 [T]. Includes the EOS token if the model produced it. T may be 0.
        logprobs: Log-probabilities of ``ids`` at temperature 1 under the sampling weights, float32 [T].
        finish_reason: ``"stop"`` if the model ended the response, ``"length"`` if it was truncated at
            ``data.max_response_length``.
        weights_version: Oldest weights version that contributed to the response, so that staleness is never
            understated.
        versions_T: Weights version that sampled each token, int32 [T], ascending. Versions differ if the weights were
            updated in flight.
        student_ids_TJ: The student's likeliest ids at each position under the weights that sampled the token, int32
            [T, J]; -1 for an id without probability. None if the support of the loss does not contain them, and after
            the teacher has scored the response.
        inserted: Tokens between the turns of a conversation. None in a response of one turn.
        rewrites: Places where a conversation goes on from another history, ascending;
            :func:`recipe_gkd.data.parts.parts_of` divides it there.
        transcript: Messages and numbers of a conversation. None without ``rollout.environment`` and ``rollout.tools``,
            and in the actor.
        prompt_ids: Prompt that the environment of the conversation has set, int32 [P]. None: the row's.
        start: Index of the first token in the whole response, of which this is a part; 0 for a whole one.
        routed_experts_PX: Ids of the experts that the engine chose for the first tokens of prompt and response, int16
            [P, layers, experts of a token] (``rollout.routing_replay``). Entries of layers without experts are unused.
            The actor chooses the experts of tokens with -1, and of those without a row. None without replay.
    """

    uid: int
    ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    weights_version: int
    versions_T: np.ndarray
    student_ids_TJ: np.ndarray | None = None
    inserted: InsertedTokens | None = None
    rewrites: tuple[Rewrite, ...] = ()
    transcript: Transcript | None = None
    prompt_ids: np.ndarray | None = None
    start: int = 0
    routed_experts_PX: np.ndarray | None = None

    @property
    def is_left_out(self) -> bool:
        """True for a failed conversation that is not trained on (``rollout.on_environment_failure=skip``)."""
        return self.transcript is not None and bool(self.transcript.failure) and not len(self.ids)

    @property
    def last_turn_ids(self) -> np.ndarray:
        """Token ids of the last turn, int32."""
        return self.ids[self.turn_starts[-1] :]

    @property
    def turn_starts(self) -> list[int]:
        """Index in ``ids`` of the first token of each turn, ascending."""
        starts = {0, *(rewrite.before for rewrite in self.rewrites)}
        if self.inserted is not None:
            starts.update(self.inserted.before_N.tolist())
        return sorted(starts)

    @property
    def sequence_ids(self) -> np.ndarray:
        """All tokens after the prompt, int32: the response tokens, and those inserted between them.

        A conversation with :attr:`rewrites` is several sequences.
        """
        if self.inserted is None:
            return self.ids
        return np.insert(self.ids, self.inserted.before_N, self.inserted.ids_N)

    @property
    def offsets_T(self) -> np.ndarray:
        """Index of each response token in ``sequence_ids``, int32 [T]."""
        index_T = np.arange(len(self.ids), dtype=np.int32)
        if self.inserted is None:
            return index_T
        return index_T + np.searchsorted(self.inserted.before_N, index_T, side="right").astype(np.int32)

    @property
    def n_inserted(self) -> int:
        """Number of tokens between the turns."""
        return 0 if self.inserted is None else len(self.inserted.ids_N)


@dataclass(frozen=True, kw_only=True)
class TeacherTopK:
    """The teacher's probabilities at the ids of the support, at every response position.

    Row t is the distribution that predicts response token t. The support is the teacher's top-k, the student's
    likeliest ids, or both (``teacher.support``).

    Attributes:
        logps_TK: Log-probabilities of the ids, float32 or float16 [T, K]; -inf for an unused entry.
        ids_TK: Token ids, distinct in a row, int32 [T, K]; -1 for an unused entry.
        sampled_logps_T: Log-probabilities of the response tokens, float32 [T].
        is_cached: True if the scores are from ``teacher.cache_dir``.
    """

    logps_TK: np.ndarray
    ids_TK: np.ndarray
    sampled_logps_T: np.ndarray
    is_cached: bool = False

    @property
    def n_bytes(self) -> int:
        """Memory of the top-k, in bytes."""
        return self.logps_TK.nbytes + self.ids_TK.nbytes

    @property
    def is_scored_T(self) -> np.ndarray:
        """True for the tokens that a teacher scored, bool [T]: those with a valid id."""
        is_scored_T = self.ids_TK[:, 0] >= 0 if self.ids_TK.shape[1] else np.zeros(len(self.ids_TK), np.bool_)
        # Usually the first id is valid. The others are read only if it is not, because they are much memory.
        return np.asarray(is_scored_T if is_scored_T.all() else (self.ids_TK >= 0).any(1))

    @property
    def n_scored(self) -> int:
        """Number of tokens that a teacher scored."""
        return int(np.count_nonzero(self.is_scored_T))

    @classmethod
    def absent(cls, rows: int) -> TeacherTopK:
        """Return a distribution without probability mass, for responses without scores.

        A response has no scores if it is not sent to a teacher, has no tokens, or was skipped.

        Args:
            rows: Number of response tokens T.
        """
        return cls(
            logps_TK=np.full((rows, 1), -np.inf, np.float32),
            ids_TK=np.full((rows, 1), -1, np.int32),
            sampled_logps_T=np.zeros(rows, np.float32),
        )

    def extended(self, rows: int) -> TeacherTopK:
        """Return the distribution with absent rows at the end.

        Args:
            rows: Number of response tokens T, at least the present one.
        """
        n_absent, k = rows - len(self.ids_TK), self.ids_TK.shape[1]
        return replace(
            self,
            logps_TK=np.concatenate([self.logps_TK, np.full((n_absent, k), -np.inf, self.logps_TK.dtype)]),
            ids_TK=np.concatenate([self.ids_TK, np.full((n_absent, k), -1, np.int32)]),
            sampled_logps_T=np.concatenate([self.sampled_logps_T, np.zeros(n_absent, np.float32)]),
        )


@dataclass(frozen=True, kw_only=True)
class StoredTopK:
    """The teacher's most likely tokens at every response position, which are in the object store of a node.

    Everything that does not grow with K is here; :mod:`recipe_gkd.teachers.scoring` fetches the rest.

    Attributes:
        block: Reference to the top-k of several responses: a list of pairs ``logps_TK, ids_TK`` as in
            :class:`TeacherTopK`, without rows for the positions that no teacher scored. None after the update.
        index: Position of this response in the block.
        n_bytes: Memory of the top-k of this response, in bytes.
        home: Index of the node whose store has the block; see :class:`recipe_gkd.teachers.scoring.homes.Homes`.
        n_scored: Number of tokens that the teacher scored. They are the first of the response.
        sampled_logps_T: Log-probabilities of the response tokens, float32 [T].
        is_cached: True if the scores are from ``teacher.cache_dir``.
    """

    block: Any
    index: int
    n_bytes: int
    home: int
    n_scored: int
    sampled_logps_T: np.ndarray
    is_cached: bool = False

    @property
    def is_scored_T(self) -> np.ndarray:
        """True for the tokens that a teacher scored, bool [T]."""
        return np.arange(len(self.sampled_logps_T)) < self.n_scored

    def extended(self, rows: int) -> StoredTopK:
        """Return the same scores for a response of ``rows`` tokens. The tokens at the end were not scored."""
        absent_T = np.zeros(rows - len(self.sampled_logps_T), np.float32)
        return replace(self, sampled_logps_T=np.concatenate([self.sampled_logps_T, absent_T]))

    def fetched(self, logps_TK: np.ndarray, ids_TK: np.ndarray) -> TeacherTopK:
        """Return the scores with their top-k, which has rows for the scored tokens."""
        found = TeacherTopK(logps_TK=logps_TK, ids_TK=ids_TK, sampled_logps_T=self.sampled_logps_T[: len(ids_TK)])
        n_tokens = len(self.sampled_logps_T)
        return found if len(ids_TK) == n_tokens else found.extended(n_tokens)


@dataclass(frozen=True)
class Reward:
    """Reward of a response.

    Attributes:
        score: The reward. With several functions, the sum of their weighted scores.
        numbers: Other numbers by name, for metrics. With several functions, the score of each by its label.
        turn_scores: Rewards of the turns of a conversation, of which ``score`` is the sum. Empty if it is a reward for
            the whole conversation.
    """

    score: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    turn_scores: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A scored sample, ready for training.

    Attributes:
        response: Response to the prompt.
        teacher: Scores of the teacher.
        teacher_number: Index of the teacher in :func:`recipe_gkd.config.teachers.names`.
        is_skipped: True if the teacher did not return scores (``teacher.on_failure=skip_samples``). The sample does not
            contribute to the distillation loss. A skipped reference response does not contribute to the cross-entropy
            either.
        reward: Reward of the response. None if the reward function was not called.
        reward_numbers: Other numbers that the reward function returned, by name.
        turn_rewards: Rewards of all turns of the conversation. Empty if it has one reward.
        advantage: Advantage of the response among the responses to the same prompt, or of each of its tokens, float32
            [T]. 0 without rewards.
        baseline: Value subtracted from the token rewards log p - log q of ``k1``.
        scale: Divisor of the token rewards after the baseline is subtracted.
    """

    prompt: Prompt
    response: Response
    teacher: TeacherTopK | StoredTopK
    teacher_number: int = 0
    is_skipped: bool = False
    reward: float | None = None
    reward_numbers: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    advantage: float | np.ndarray = 0.0
    baseline: float = 0.0
    scale: float = 1.0

    @property
    def is_reference(self) -> bool:
        """True if the response is the reference response of the data."""
        return self.prompt.reference_ids is not None

    def __post_init__(self) -> None:
        rows = len(self.response.ids)
        if self.prompt.uid != self.response.uid:
            raise ValueError(f"the response to prompt {self.response.uid} was attached to prompt {self.prompt.uid}")
        lengths = {
            "logprobs": len(self.response.logprobs),
            "versions": len(self.response.versions_T),
            "teacher logprobs of the response tokens": len(self.teacher.sampled_logps_T),
        }
        if isinstance(self.teacher, TeacherTopK):
            lengths["teacher rows"] = len(self.teacher.logps_TK)
            lengths["teacher id rows"] = len(self.teacher.ids_TK)
        if set(lengths.values()) != {rows}:
            listed = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise ValueError(f"sample {self.prompt.uid}: {rows} response tokens, {listed}; all must be equal")
        if self.response.rewrites:
            raise ValueError(f"sample {self.prompt.uid} is several sequences; divide it with parts_of")
        if (inserted := self.response.inserted) is not None:
            _check_inserted(inserted, rows, self.prompt.uid)

    @property
    def top_k(self) -> TeacherTopK:
        """The teacher's top-k.

        Raises:
            ValueError: It is in the object store of a node, and was not fetched.
        """
        if isinstance(self.teacher, StoredTopK):
            raise ValueError(f"sample {self.prompt.uid}: the teacher's top-k is in an object store; fetch it first")
        return self.teacher

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt, response and the tokens between its turns, int32 [P + T + N]."""
        return np.concatenate([self.prompt.ids, self.response.sequence_ids])

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the prompt, of the response, and between its turns."""
        return len(self.prompt.ids) + len(self.response.ids) + self.response.n_inserted


def _check_inserted(inserted: InsertedTokens, n_tokens: int, uid: int) -> None:
    before_N = inserted.before_N
    is_valid = len(before_N) == len(inserted.ids_N) and (np.diff(before_N) >= 0).all()
    if not is_valid or (len(before_N) and not 0 <= before_N[0] <= before_N[-1] < n_tokens):
        raise ValueError(
            f"sample {uid}: {len(inserted.ids_N)} inserted tokens before the response tokens {before_N.tolist()}; "
            f"expected as many indices, ascending, from 0 to {n_tokens - 1}"
        )
