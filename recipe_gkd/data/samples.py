"""One sample's life: a prompt, then an answer, then what the teacher thinks of it.

Everything stays ragged (arrays of one sample, never a padded batch) until the actor packs it.
Axis names: P prompt tokens, T response tokens, K teacher top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenized prompt at its place in the run."""

    uid: int
    """Number of this sample in the run, from 0; `rollout.n` answers to one prompt have `n` uids."""
    ids: np.ndarray
    """int32 [P]."""
    row: int
    """Row of the data set it came from; the other columns stay there."""
    reference_ids: np.ndarray | None = None
    """int32 [T]: the answer of the data, which is trained on instead of a sampled one (``gkd.sft_share``)."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What a rollout worker made of a prompt."""

    uid: int
    ids: np.ndarray
    """int32 [T], with the end-of-sequence token if the model produced it; T may be 0."""
    logprobs: np.ndarray
    """float32 [T], of the sampled tokens, at temperature 1, under the weights that sampled them."""
    finish_reason: str
    """`stop`: the model ended; `length`: cut at `data.max_response_length`."""
    weights_version: int
    """Number of optimizer steps behind the oldest weights that had a part in it: staleness is never understated."""
    versions_T: np.ndarray
    """int32 [T], ascending: the weights' version that sampled each token; they differ if weights changed in flight."""


@dataclass(frozen=True, kw_only=True)
class TeacherTopK:
    """The teacher's opinion at every response position; row t is the distribution that predicts response token t."""

    logps_TK: np.ndarray
    """float32, descending."""
    ids_TK: np.ndarray
    """int32 token ids."""
    sampled_logps_T: np.ndarray
    """float32, the teacher's logprob of the token that the student sampled."""

    @classmethod
    def absent(cls, rows: int) -> TeacherTopK:
        """For an answer that no teacher is asked about, that has no tokens, or was skipped: no probability anywhere."""
        return cls(
            logps_TK=np.full((rows, 1), -np.inf, np.float32),
            ids_TK=np.full((rows, 1), -1, np.int32),
            sampled_logps_T=np.zeros(rows, np.float32),
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample that is ready to be trained on."""

    prompt: Prompt
    response: Response
    teacher: TeacherTopK
    teacher_number: int = 0
    """Which teacher's: its place in :func:`recipe_gkd.config.teachers.names`."""
    is_skipped: bool = False
    """Its teacher was asked and gave no answer (``teacher.on_failure=skip_samples``): nothing is learned from a teacher
    on it, and a given answer does not become one that teaches by its own tokens."""
    reward: float | None = None
    """What the reward function said of it, if it was asked."""
    advantage: float = 0.0
    """Of its reward, among the answers to the same prompt; 0 without rewards."""
    baseline: float = 0.0
    """Subtracted from the sampled-token rewards log p - log q of `k1`."""
    scale: float = 1.0
    """They are divided by it then."""

    @property
    def is_reference(self) -> bool:
        """Its answer is of the data, not sampled from the student."""
        return self.prompt.reference_ids is not None

    def __post_init__(self) -> None:
        rows = len(self.response.ids)
        if self.prompt.uid != self.response.uid:
            raise ValueError(f"answer {self.response.uid} was attached to prompt {self.prompt.uid}")
        lengths = {
            "logprobs": len(self.response.logprobs),
            "versions": len(self.response.versions_T),
            "teacher rows": len(self.teacher.logps_TK),
            "teacher id rows": len(self.teacher.ids_TK),
            "teacher logprobs of them": len(self.teacher.sampled_logps_T),
        }
        if set(lengths.values()) != {rows}:
            told = ", ".join(f"{length} {what}" for what, length in lengths.items())
            raise ValueError(f"sample {self.prompt.uid}: {rows} response tokens, {told}; all must be equal")

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + T]: what the actor's forward pass sees."""
        return np.concatenate([self.prompt.ids, self.response.ids])

    @property
    def n_tokens(self) -> int:
        return len(self.prompt.ids) + len(self.response.ids)
